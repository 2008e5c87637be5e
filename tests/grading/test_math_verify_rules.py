"""The default grader: what it takes for equal, and what it does not."""

from __future__ import annotations

import pytest

from cfprm_jax.grading.math_verify_rules import equal, words

RIGHT = [
    ("1,000", "1000"),  # thousands separators
    ("1{,}000", "1000"),
    ("25\\,000", "25000"),
    ("25 000", "25000"),
    ("1,234.5", "1234.5"),
    ("- 5", "-5"),  # signs
    ("−5", "-5"),
    ("+5", "5"),
    ("1/2", "0.5"),  # fractions and decimals
    ("0.5", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\frac12"),
    ("\\frac{2}{4}", "\\frac12"),
    ("0.333333", "1/3"),
    ("3\\frac{1}{2}", "\\frac{7}{2}"),
    ("3 1/2", "3.5"),
    (".5", "0.5"),
    ("5.", "5"),
    ("50\\%", "50"),  # percentages
    ("50%", "0.5"),
    ("0.5", "50\\%"),
    ("\\$5", "5"),  # units and dollars
    ("\\$1,234.50", "1234.5"),
    ("5 dollars", "5"),
    ("5 cm", "5"),
    ("12 \\, \\text{cm}", "12"),
    ("5\\text{ cm}^2", "5"),
    ("5", "5\\text{ miles}"),
    ("(0,1]", "\\left(0,1\\right]"),  # intervals and tuples
    ("1,2", "2,1"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(-\\infty,2)\\cup(3,\\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
    ("3,-3", "\\pm 3"),
    ("(0,1)", "0<x<1"),
    ("0<x<1", "(0,1)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),  # matrices
    ("\\begin{pmatrix} 1/2 \\\\ 3 \\end{pmatrix}", "\\begin{pmatrix} \\frac12 \\\\ 3 \\end{pmatrix}"),
    ("\\text{east}", "east"),  # text answers
    ("evelyn.", "\\text{Evelyn}"),
    ("C", "\\text{(C)}"),
    ("\\text{June 5}", "June 5"),
    ("None", "None"),
    ("\\text{None}", "None"),
    ("It cannot be determined from this.", "None"),
    ("not enough information", "None"),
    ("90", "90^\\circ"),  # degrees
    ("90^{\\circ}", "90"),
    ("90 degrees", "90"),
    ("5", "x=5"),
    ("x = 5", "x=5"),
    ("(x+1)^2", "x^2+2x+1"),
    ("2\\sqrt2", "\\sqrt{8}"),
]
WRONG = [
    ("1,000", "1"),
    ("-5", "5"),
    ("1/3", "0.33"),
    ("5000", "50\\%"),
    ("(0,1]", "[0,1]"),
    ("(1,2)", "(2,1)"),
    ("(1,2,3)", "(1,2)"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\4&3\\end{pmatrix}"),
    ("West", "\\text{east}"),
    ("stressed", "desserts"),  # not the product of the same letters
    ("\\text{odd}", "\\text{even}"),
    ("D", "\\text{(C)}"),
    ("0", "None"),
    ("5", "None"),
    ("the number 5", "None"),
    ("None", "5"),
    ("45^\\circ", "90^\\circ"),
    ("5 million", "5"),
    ("1 dozen", "1"),
    ("3\\pi", "9.42"),
    ("\\infty", "-\\infty"),
    ("11:30", "12:30"),
    ("", "5"),
    ("(x+1)^2", "x^2+2x+2"),
]


@pytest.mark.parametrize(("predicted", "gold"), RIGHT)
def test_right(predicted, gold):
    assert equal(predicted, gold)


@pytest.mark.parametrize(("predicted", "gold"), WRONG)
def test_wrong(predicted, gold):
    assert not equal(predicted, gold)


def test_words_are_no_mathematics():
    assert words("Monday") == "Monday" and words("\\text{odd}") == "odd"
    assert words("xyz") is None and words("5 apples") is None and words("\\text{C}") is None
