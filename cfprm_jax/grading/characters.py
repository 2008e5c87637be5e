r"""Characters of an answer with LaTeX equivalents: √8 is \sqrt{8}, ½ is \frac{1}{2}, x² is x^{2}, – is a minus.

What Unicode calls compatible (full-width digits, mathematical alphabets, ligatures) becomes the plain character (NFKC).
That comes after the characters above, whose place NFKC forgets: it makes x2 of x², and 52 of 5².
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙᵢ", "0123456789+-=()ni", strict=True))
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_FRACTIONS = re.compile("[¼-¾⅐-⅞↉]")
_FRACTION_SLASH = re.compile("([0-9]+)\u2044([0-9]+)")
_DASHES = re.compile("[\u2010-\u2015\u2212\u02d7\ufe58\ufe63\uff0d]")
# Zero width, direction marks, variation selectors and the soft hyphen: no reader sees them.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff]")
# A digit, or several, under a line or a dot: the digits that repeat.
_REPEATING = re.compile("(?:[0-9][\u0304\u0305\u0307])+")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}
_ROOT = re.compile(
    r"(?P<root>[√∛∜]) *(?:\((?P<inside>[^()]*)\)|(?P<group>\{[^{}]*\})|"
    r"(?P<one>[0-9]+(?:\.[0-9]+)?|[a-zA-Zπ]|\\[a-zA-Z]+))"
)
_SIGNS = {
    "∞": "\\infty",
    "∪": "\\cup",
    "∩": "\\cap",
    "∅": "\\emptyset",
    "⌀": "\\emptyset",
    "≤": "\\le",
    "⩽": "\\le",
    "≦": "\\le",
    "≥": "\\ge",
    "⩾": "\\ge",
    "≧": "\\ge",
    "≠": "\\ne",
    "≈": "\\approx",
    "±": "\\pm",
    "∓": "\\mp",
    "×": "\\times",
    "⋅": "\\cdot",
    "∙": "\\cdot",
    "·": "\\cdot",
    "÷": "\\div",
    "∈": "\\in",
    "π": "\\pi",
    "ℕ": "\\mathbb{N}",
    "ℤ": "\\mathbb{Z}",
    "ℚ": "\\mathbb{Q}",
    "ℝ": "\\mathbb{R}",
    "ℂ": "\\mathbb{C}",
    "…": "\\ldots",
    "⋯": "\\cdots",
}
_SIGN = re.compile(f"[{''.join(_SIGNS)}]")
_DEGREES = re.compile("[°º˚]")
_SLASHES = re.compile("[\u2044\u2215\uff0f]")


def plain(answer: str) -> str:
    """The answer with LaTeX for these characters, and plain letters, digits and spaces."""
    if answer.isascii():
        return answer
    answer = _INVISIBLE.sub("", answer)
    answer = _RAISED.sub(lambda m: f"^{{{''.join(_SUPERSCRIPTS[c] for c in m[0])}}}", answer)
    answer = _LOWERED.sub(lambda m: f"_{{{''.join(_SUBSCRIPTS[c] for c in m[0])}}}", answer)
    answer = _FRACTIONS.sub(_fraction, answer)
    answer = _SIGN.sub(lambda m: f"{_SIGNS[m[0]]} ", answer)
    answer = _DEGREES.sub("^{\\\\circ}", _DASHES.sub("-", answer))
    answer = _REPEATING.sub(lambda m: f"\\overline{{{''.join(c for c in m[0] if c.isdigit())}}}", answer)
    answer = unicodedata.normalize("NFKC", answer)
    answer = _DEGREES.sub("^{\\\\circ}", _SLASHES.sub("/", _FRACTION_SLASH.sub(r"\\frac{\1}{\2}", answer)))
    return _ROOT.sub(_root, answer).strip()


def _fraction(found: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _root(found: re.Match[str]) -> str:
    inside = found["inside"] if found["inside"] is not None else (found["group"] or "")[1:-1] or found["one"] or ""
    return f"{_ROOTS[found['root']]}{{{inside}}}"
