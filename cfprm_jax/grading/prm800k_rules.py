r"""The strict grader: an answer is right by the rules that PRM800K was graded with.

The rules, after the grading that PRM800K publishes (openai/prm800k, prm800k/grading), which in its turn begins with the
normal form of the MATH data set:

1. Two answers are equal whose MATH forms are the same text: without line breaks, white space, \!, \left, \right,
   degrees, \$, \%, a right-hand unit ("\text{ cm}"), a short left side of an equation ("x="), with \dfrac and \tfrac as
   \frac, arguments in braces, a/b of whole numbers as a fraction, and 0.5 as 1/2.
2. Or whose plain forms are the same text: without currency and percent signs, units of a list, degrees and braces, "or"
   and "and" as commas, millions multiplied out, LaTeX read as plain text, lower case, a whole number as its digits, and
   a mixed number as a sum.
3. Or whose plain forms have the same brackets and the same number of elements, each of them equal: two fractions of
   whole numbers only as texts, so that 2/4 is not 1/2; a whole number only to a whole number; anything else if sympy
   simplifies the difference to 0.
4. sympy is used only for expressions with at most two different letters and without exponents that are in brackets,
   nested, or of more than one digit.

Where this differs from the published program: an expression is read by a grammar of our own (expressions), as the
program has Python evaluate it; roots keep their index, so that 1/\sqrt[3]{3} is not \sqrt{3}/3; a numerator or
denominator of several terms or factors keeps its brackets; an unknown command keeps its name; and a whole
number is one exactly and in digits, where the program rounds (0.00000001 would be 0) and takes an underscore between
digits (52_8 would be 528).
"""

from __future__ import annotations

import decimal
import re

from cfprm_jax.grading import characters, expressions
from cfprm_jax.grading.latex_text import plain_text

_BRACKETS = "()[]"
_MOST_LETTERS = 2
_UNITS = (
    "degree",
    "cm",
    "centimeter",
    "meter",
    "mile",
    "second",
    "minute",
    "hour",
    "day",
    "week",
    "month",
    "year",
    "foot",
    "feet",
    "inch",
    "yard",
)
# The longest first, so that a centimeter is not cut to a centi.
_UNIT = re.compile(rf"(?:{'|'.join(sorted(_UNITS, key=len, reverse=True))})(?:es)?s? *(?:\^[0-9]+)?")
_WHOLE_TEXT = re.compile(r"\\text\{(?P<inside>.+?)\}", re.DOTALL)
_SHORT_ASSIGNMENT = re.compile(r"[^=]{0,2}=(?P<value>[^=]*)")
_FRACTION_OF_INTEGERS = re.compile(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))")
_DIGIT_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?:$|[^0-9]))")
_REFUSED_EXPONENT = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]")
# Digits and exponent are bounded, as Python's own conversion is.
_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:[eE][-+]?[0-9]{1,2})?")
_MAGNITUDES = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))


def equal(predicted: str, gold: str) -> bool:
    """Whether the predicted answer is right by these rules. May take without end: call it where it can be killed."""
    predicted, gold = characters.plain(predicted), characters.plain(gold)
    if math_form(predicted) == math_form(gold):
        return True
    given, expected = plain_form(predicted), plain_form(gold)
    if given == expected:
        return True
    if not given or not expected:
        return False
    given_parts, expected_parts = _elements(given), _elements(expected)
    if len(given_parts) != len(expected_parts):
        return False
    if len(expected_parts) > 1 and (given[0] != expected[0] or given[-1] != expected[-1]):
        return False
    return all(_equal_element(a, b) for a, b in zip(given_parts, expected_parts, strict=True))


def math_form(answer: str) -> str:
    """Rule 1: the normal form of the MATH data set."""
    answer = answer.strip()
    if whole := _WHOLE_TEXT.fullmatch(answer):
        answer = whole["inside"].strip()
    original = answer
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")):
        answer = answer.replace(old, new)
    for old in ("\\right", "^{\\circ}", "^\\circ", "\\$"):
        answer = answer.replace(old, "")
    before, unit, after = answer.partition("\\text{ ")
    if unit and unit in after:
        return original  # two units: no answer with a unit, and none of the rest applies
    answer = before.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if answer.startswith("."):
        answer = f"0{answer}"
    if assigned := _SHORT_ASSIGNMENT.fullmatch(answer):
        answer = assigned["value"]
    answer = _braced_fractions(re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", ""))
    if answer == "0.5":
        return "\\frac{1}{2}"
    return _FRACTION_OF_INTEGERS.sub(r"\\frac{\1}{\2}", answer) if _FRACTION_OF_INTEGERS.fullmatch(answer) else answer


def _braced_fractions(answer: str) -> str:
    r"""\frac12 as \frac{1}{2}; what begins with a brace is taken to be braced already."""
    pieces = answer.split("\\frac")
    if any(len(piece) < 2 for piece in pieces[1:] if not piece.startswith("{")):
        return answer
    for place, piece in enumerate(pieces[1:], 1):
        if not piece.startswith("{"):
            second = piece[1:] if piece[1] == "{" else f"{{{piece[1]}}}{piece[2:]}"
            pieces[place] = f"{{{piece[0]}}}{second}"
    return "\\frac".join(pieces)


def plain_form(answer: str) -> str:
    """Rule 2: an answer as plain text that sympy can read."""
    if whole := _WHOLE_TEXT.fullmatch(answer):
        answer = whole["inside"]
    for sign in ("\\%", "\\$", "$", "%"):
        answer = answer.replace(sign, "")
    answer = answer.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _MAGNITUDES:
        answer = answer.replace(word, factor)
    answer = re.sub(r"\^ *\\circ", "", _UNIT.sub("", answer))
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", "", answer)
    answer = _digits(answer) or answer
    if "\\" in answer:
        answer = plain_text(answer)
    answer = re.sub(r"- *", "-", answer)
    answer = re.sub(r"([0-9]) +([0-9])", r"\1+\2", answer)  # a mixed number
    answer = answer.replace(" ", "").replace("{", "").replace("}", "").lower()
    return _digits(_THOUSANDS.sub("", answer)) or answer


def _digits(text: str) -> str | None:
    """A whole number, whatever it is written as, by its digits; None for what is none."""
    if not _DECIMAL.fullmatch(text):
        return None
    value = decimal.Decimal(text)
    return str(int(value)) if value == value.to_integral_value() else None


def _elements(text: str) -> list[str]:
    """What a pair of brackets holds between its commas; a text without brackets around it is one element."""
    text = _THOUSANDS.sub("", text)
    inside = text[1:-1]
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not set(inside) & set(_BRACKETS):
        return [element.strip() for element in inside.split(",")]
    return [text]


def _equal_element(given: str, expected: str) -> bool:
    """Rule 3 for one element."""
    if _DIGIT_FRACTION.fullmatch(given) and _DIGIT_FRACTION.fullmatch(expected):
        return given == expected
    if (_digits(_THOUSANDS.sub("", given)) is None) != (_digits(_THOUSANDS.sub("", expected)) is None):
        return False
    return _no_difference(given, expected)


def _no_difference(given: str, expected: str) -> bool:
    """Whether sympy, where rule 4 allows it, finds that the difference is 0."""
    difference = f"({expected})-({given})"
    letters = {character for character in difference.replace("sqrt", "").replace("frac", "") if character.isalpha()}
    if len(letters) > _MOST_LETTERS or _REFUSED_EXPONENT.search(difference):
        return False
    import sympy

    try:
        return bool(sympy.simplify(expressions.parse(difference)) == 0)
    except MemoryError:
        raise
    except Exception:  # a text that is no expression, or one that sympy cannot simplify, in as many ways as it has
        return False
