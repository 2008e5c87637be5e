r"""Plain text as a sympy expression, by a grammar of its own: no text reaches Python's or sympy's evaluation.

    sum      := product (("+" | "-") product)*
    product  := signed (("*" | "/") signed | power)*
    signed   := ("+" | "-") signed | power
    power    := postfix (("^" | "**") signed)?
    postfix  := atom "!"*
    atom     := number | constant | letter | letter "(" sum ")" | function power | "(" sum ")"

A product may be written without its sign, and binds as it does with it: 1/2x is x/2. A letter directly before brackets
is an unknown function. Everything else is refused, and so is what would grow without a bound while it is built: texts
that are too long, brackets too deep, and too large powers and factorials.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

MAX_CHARACTERS = 1000
MAX_DEPTH = 40
MAX_EXPONENT = 1000
MAX_FACTORIAL = 1000
MAX_BITS = 1 << 14
"""Of a numerator or denominator that a power makes."""

_FUNCTIONS = (
    *("sqrt", "exp", "log", "ln"),
    *("arcsin", "arccos", "arctan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("sin", "cos", "tan", "cot", "sec", "csc"),
)
_LETTER = "[a-zA-Zα-ωΑ-Ω]"
_TOKEN = re.compile(
    rf"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![0-9.]))?)"
    rf"|(?P<function>{'|'.join(_FUNCTIONS)})|(?P<constant>pi|π)|(?P<letter>{_LETTER})|(?P<sign>\*\*|[-+*/^()!])| +"
)


class ExpressionError(ValueError):
    """A text that the grammar does not have, or that is beyond a bound."""


def parse(text: str) -> Any:
    """The sympy expression that a text stands for.

    Raises:
      ExpressionError: it is not in the grammar, or exceeds a bound.
    """
    return _Parser(text).parsed()


class _Parser:
    """A recursive descent over the tokens; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise ExpressionError(f"{len(text)} characters; at most {MAX_CHARACTERS} are read")
        self._tokens: list[tuple[str, str]] = []
        end = 0
        for token in _TOKEN.finditer(text):
            if token.start() != end:
                break
            end = token.end()
            if token.lastgroup is not None:
                self._tokens.append((token.lastgroup, token[0]))
        if end != len(text):
            raise ExpressionError(f"{text[end]!r} at character {end}")
        self._place = self._depth = 0

    def parsed(self) -> Any:
        result = self._sum()
        if self._place != len(self._tokens):
            self._fail()
        return result

    def _kind(self) -> str | None:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else None

    def _take(self, *signs: str) -> str | None:
        """The next token, read, if it is one of these signs."""
        if self._place < len(self._tokens) and self._tokens[self._place][1] in signs:
            self._place += 1
            return self._tokens[self._place - 1][1]
        return None

    def _fail(self) -> NoReturn:
        rest = self._tokens[self._place : self._place + 1]
        raise ExpressionError(f"{rest[0][1]!r} where the grammar has something else" if rest else "it ends too early")

    def _nested(self, rule: Callable[[], Any]) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} levels")
        result = rule()
        self._depth -= 1
        return result

    def _sum(self) -> Any:
        value = self._product()
        while sign := self._take("+", "-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Any:
        value = self._signed()
        while True:
            if sign := self._take("*", "/"):
                value = value * self._signed() if sign == "*" else value / self._signed()
            elif self._starts_factor():
                value = value * self._power()
            else:
                return value

    def _starts_factor(self) -> bool:
        """Whether a factor follows without a sign; two numbers in a row are no product."""
        kind = self._kind()
        if kind == "number":
            return self._tokens[self._place - 1][0] != "number"
        return kind in ("function", "constant", "letter") or self._tokens[self._place : self._place + 1] == [
            ("sign", "(")
        ]

    def _signed(self) -> Any:
        sign = self._take("+", "-")
        if sign is None:
            return self._power()
        value = self._nested(self._signed)
        return -value if sign == "-" else value

    def _power(self) -> Any:
        base = self._postfix()
        if self._take("^", "**"):
            return power(base, self._nested(self._signed))
        return base

    def _postfix(self) -> Any:
        value = self._atom()
        while self._take("!"):
            value = _factorial(value)
        return value

    def _atom(self) -> Any:
        import sympy

        kind = self._kind()
        if self._take("("):
            return self._closed()
        if kind in (None, "sign"):
            self._fail()
        text = self._tokens[self._place][1]
        self._place += 1
        if kind == "number":
            return number(text)
        if kind == "constant":
            return sympy.pi
        if kind == "letter":
            return sympy.Function(text)(self._closed()) if self._take("(") else sympy.Symbol(text)
        exponent = self._nested(self._postfix) if self._take("^", "**") else None
        applied = _function(text)(self._closed() if self._take("(") else self._nested(self._power))
        return applied if exponent is None else power(applied, exponent)

    def _closed(self) -> Any:
        """What is in brackets, whose opening one has been read."""
        value = self._nested(self._sum)
        if not self._take(")"):
            self._fail()
        return value


def number(text: str) -> Any:
    """A whole number, or a decimal one as a float of sympy.

    Raises:
      ExpressionError: its digits are no number, or too many.
    """
    import sympy

    if text.isascii() and text.isdigit():
        return sympy.Integer(int(text))
    try:
        # A float from digits: sympy's own reader of numbers evaluates text.
        return sympy.Float(text)
    except ValueError:
        raise ExpressionError(f"{text!r} is no number") from None


def power(base: Any, exponent: Any) -> Any:
    """base ^ exponent.

    Raises:
      ExpressionError: the result would be too large.
    """
    import sympy

    if exponent.is_number:
        if base.is_Rational and exponent.is_Rational:
            bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
            size = bits * abs(exponent) if abs(base) != 1 else 0
            if size > MAX_BITS:
                raise ExpressionError("a power of too many digits")
        elif not exponent.is_Atom and not exponent.free_symbols and exponent.has(sympy.Pow):
            # A tower of powers that is not evaluated here would be evaluated when it is simplified.
            if any(part.is_Pow and part.exp.is_Integer for part in sympy.preorder_traversal(exponent)):
                raise ExpressionError("a tower of powers")
        elif exponent.is_Rational and abs(exponent) > MAX_EXPONENT:
            raise ExpressionError("too large an exponent")
    result = base**exponent
    if (
        result.is_Pow
        and result.exp.is_Rational
        and abs(result.exp) > MAX_EXPONENT
        and result.base.is_Rational is not True
    ):
        raise ExpressionError("too large an exponent")
    return result


def _factorial(value: Any) -> Any:
    import sympy

    if value.is_number and not (value.is_Integer and 0 <= value <= MAX_FACTORIAL):
        raise ExpressionError(f"a factorial of something that is no whole number from 0 to {MAX_FACTORIAL}")
    return sympy.factorial(value)


def _function(name: str) -> Callable[[Any], Any]:
    import sympy

    return getattr(sympy, {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(name, name))
