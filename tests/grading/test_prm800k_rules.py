"""The strict rules of PRM800K: what they take for equal, and what they do not."""

from __future__ import annotations

import pytest

from cfprm_jax.grading.prm800k_rules import equal, math_form, plain_form

RIGHT = [
    ("1,000", "1000"),  # thousands separators
    ("10,\\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("- 5", "-5"),  # signs
    ("\\dfrac{1}{2}", "\\frac12"),  # fractions and decimals
    ("1/2", "\\frac{1}{2}"),
    ("0.5", "\\frac{1}{2}"),
    ("3.2", "\\frac{16}{5}"),
    (".5", "0.5"),
    ("2.0", "2"),
    ("\\frac{-35}{9}", "-\\frac{35}{9}"),
    ("3\\frac{1}{2}", "3.5"),
    ("50\\%", "50"),  # percentages
    ("50%", "50"),
    ("\\$5", "5"),  # units and dollars
    ("\\$1,234.50", "1234.5"),
    ("12 \\text{ cm}", "12"),
    ("36 \\text{ miles}", "36"),
    ("5 minutes", "5"),
    ("3 million", "3 * 10^6"),
    ("[0,1]", "\\left[0, 1\\right]"),  # intervals and tuples
    ("(\\frac{1}{2}, 3)", "(0.5,3)"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)"),
    ("(-\\infty, 2)\\cup(3,\\infty)", "(-\\infty,2) \\cup (3,\\infty)"),
    ("\\begin{pmatrix} -\\frac{1}{3} \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} -1/3 \\\\ 2 \\end{pmatrix}"),  # matrices
    ("\\text{Evelyn}", "evelyn"),  # text answers
    ("C", "\\text{(C)}"),
    ("None", "None"),
    ("90", "90^\\circ"),  # degrees
    ("90^{\\circ}", "90"),
    ("5", "x=5"),
    ("x = 5", "x=5"),
    ("11\\sqrt{2}", "11\\sqrt2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\frac{1+\\sqrt{5}}{2}", "\\frac{\\sqrt{5}+1}{2}"),
]
WRONG = [
    ("1000", "100"),
    ("5", "-5"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),  # not reduced
    ("0.33", "\\frac{1}{3}"),
    ("5.1", "5"),
    ("3 million", "3000000"),  # a whole number is its digits
    ("2^3", "8"),
    ("5000", "50\\%"),
    ("(0,1]", "[0,1]"),
    ("(1,2)", "(2,1)"),
    ("1,-2", "-2,1"),
    ("(1,2,3)", "(1,2)"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"),
    ("\\text{odd}", "\\text{even}"),
    ("0", "None"),
    ("45^\\circ", "90^\\circ"),
    ("2516", "2516_8"),
    ("\\frac{1}{\\sqrt[3]{3}}", "\\frac{\\sqrt{3}}{3}"),  # roots keep their index
    ("\\frac{1}{2x}", "\\frac{x}{2}"),  # and denominators their brackets
    ("(x+1)^2", "x^2+2x+2"),
    ("", "5"),
    ("5", ""),
    ("\\foo{3}", "3"),
    ("2^{x}", "x^2"),
    ("12 \\text{ cm} 3 \\text{ m}", "12"),
]


@pytest.mark.parametrize(("predicted", "gold"), RIGHT)
def test_right(predicted, gold):
    assert equal(predicted, gold)


@pytest.mark.parametrize(("predicted", "gold"), WRONG)
def test_wrong(predicted, gold):
    assert not equal(predicted, gold)


def test_forms():
    assert math_form("  x = \\tfrac12\\,\\text{ m}") == "\\frac{1}{2}\\,"
    assert math_form("\\frac72") == "\\frac{7}{2}" and math_form("\\frac1{72}") == "\\frac{1}{72}"
    assert math_form("3/4") == "\\frac{3}{4}" and math_form("x/4") == "x/4"
    assert plain_form("$7\\frac{3}{4}$ feet") == "7+3/4"
    assert plain_form("5 and 6") == "5,6"


def test_words_and_towers_do_not_reach_sympy():
    # Each is an identity that sympy would find, or never come back from.
    assert not equal("abc+1", "1+abc")
    assert not equal("9^99^9", "9^99^9+0")
    assert equal("2^3+x", "8+x")
