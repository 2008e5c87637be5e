"""LaTeX as plain text."""

from __future__ import annotations

import pytest

from cfprm_jax.grading.latex_text import plain_text


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"3\frac12", "3 1/2"),
        (r"\dfrac{x+1}{2x}", "(x+1)/(2x)"),
        (r"\frac{\sqrt{2}}{-2}", "sqrt(2)/-2"),
        (r"\frac\pi2", "pi/2"),
        (r"\sqrt{x+1}", "sqrt(x+1)"),
        (r"\sqrt3", "sqrt(3)"),
        (r"\sqrt[3]{3}", "(3)^(1/3)"),
        (r"\sqrt[2]{3}", "sqrt(3)"),
        (r"\left[0, \infty\right)", "[0, inf)"),
        (r"2\cdot 3\times4", "2* 3*4"),
        (r"\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}", "[  1   2 ;  3   4  ]"),
        (r"\text{ab c} d", "ab c d"),
        (r"x^{10}", "x^10"),
        (r"\theta + \sin x", "θ + sin x"),
        (r"\foo 3", r"\foo  3"),
        (r"\{1\}", "{1}"),
        (r"\frac{1}", "1/()"),
        ("plain", "plain"),
    ],
)
def test_what_answers_are_made_of(latex, text):
    assert plain_text(latex) == text
