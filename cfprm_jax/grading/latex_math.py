r"""LaTeX of an answer as a sympy object, by the parser of math-verify and without sympy's reader of text.

math-verify's own entry point also tries sympy.parse_expr on plain expressions, and its LaTeX parser makes numbers of
digits by sympy.Number; both evaluate text as Python. Here an answer has to be made of the characters and the operator
names of an allow-list, plain expressions are not tried beside LaTeX, and numbers are made from their digits.

The parser does not end in sensible time for some texts; these functions belong into a process that can be killed.
"""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

MAX_CHARACTERS = 1000
MAX_DEPTH = 40
_ALLOWED = re.compile(r"[a-zA-Z0-9 \n\t\\{}()\[\]+\-*/^_=<>!|.,;:&%$'~α-ωΑ-Ω]*")
_OPERATOR_NAME = re.compile(r"\\operatorname\s*\*?\s*\{([^{}]*)\}")
# Those of the parser that answers have; it also takes names that build matrices of any size.
_OPERATORS = frozenset({"gcd", "lcm", "floor", "ceil", "arcsinh", "arccosh", "arctanh", "arsinh", "arcosh", "artanh"})
_DIGITS = re.compile(r"[0-9]+")
_DECIMAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
_GROUPED = re.compile(r"\s*-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?\s*")
_EQUALS = re.compile(r"(?<!\\|<|!|>)=")
_COMPLEX = re.compile(r"(?<![a-zA-Z])(?:\\?i|\\imath)(?![a-zA-Z])|\\mathbb\{C\}|\\det|\\(?:text|mathrm)\{i\}")


def parse(latex: str) -> Any | None:
    """The sympy object that LaTeX stands for; None for what is not of the allow-list, or is no mathematics."""
    from latex2sympy2_extended.math_normalization import normalize_latex

    if not allowed(latex):
        return None
    text = normalize_latex(f"\\boxed{{{latex}}}", _normalization())
    with contextlib.suppress(Exception):  # the parser fails in as many ways as there are texts
        return _converted(text)
    last = _EQUALS.split(text)[-1]
    if "," not in text and ";" not in text and last != text:
        with contextlib.suppress(Exception):
            return _converted(last)
    return None


def allowed(latex: str) -> bool:
    """Whether an answer may be parsed: its characters, operator names, length and nesting are those of answers."""
    if len(latex) > MAX_CHARACTERS or not _ALLOWED.fullmatch(latex):
        return False
    depth = 0
    for character in latex:
        depth += (character in "{([") - (character in "})]")
        if depth > MAX_DEPTH:
            return False
    return all(name.strip() in _OPERATORS for name in _OPERATOR_NAME.findall(latex))


def number(text: str) -> Any:
    """A number from its digits, whose thousands may be apart by commas.

    Raises:
      ValueError: they are no number.
    """
    import sympy

    text = text.replace(",", "").replace(" ", "")
    if _DIGITS.fullmatch(text):
        return sympy.Integer(int(text))
    if _DECIMAL.fullmatch(text):
        return sympy.Float(text)
    raise ValueError(f"{text!r} is no number")


def _converted(text: str) -> Any:
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    return _converter()(is_real=not _COMPLEX.search(text)).parse(text)


@functools.cache
def _normalization() -> Any:
    """LaTeX that is only notation, according to math-verify."""
    import math_verify

    return math_verify.LatexExtractionConfig().normalization_config.__class__(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="last", equations=False
    )


@functools.cache
def _converter() -> type:
    from latex2sympy2_extended import latex2sympy2

    class Converter(latex2sympy2._Latex2Sympy):
        """math-verify's parser (it pins the version), with numbers made from digits."""

        def parse_number(self, text: str) -> Any:
            return number(text)

    return Converter
