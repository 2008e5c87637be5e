"""Comparison of two numbers relative to their size.

math-verify compares by absolute tolerances (1e-6 for decimals, about 1e-15 else), under which all numbers near zero are
one: 1/2006! and 1/2004!. The difference has to be small beside the numbers too.
"""

from __future__ import annotations

from typing import Any

_DECIMAL = 1e-5
_EXACT = 1e-12
_DIGITS = 30


def near(one: Any, other: Any) -> bool:
    """False for two numbers, or two equally long lists of some, that differ in their leading digits."""
    import sympy

    if isinstance(one, sympy.FiniteSet | sympy.Tuple) and isinstance(other, sympy.FiniteSet | sympy.Tuple):
        pairs = zip(_ordered(one), _ordered(other), strict=False)
        return len(one) != len(other) or all(near(*pair) for pair in pairs)
    if isinstance(one, sympy.Eq):
        one = one.rhs
    if isinstance(other, sympy.Eq):
        other = other.rhs
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)) or not (one.is_number and other.is_number):
        return True
    if one.has(sympy.UnevaluatedExpr) or other.has(sympy.UnevaluatedExpr):
        return True  # percentages and shares are one
    tolerance = _DECIMAL if one.has(sympy.Float) or other.has(sympy.Float) else _EXACT
    values = [value.doit() for value in (one, other)]
    if values[0] == values[1]:
        return True
    first, second = (value.evalf(_DIGITS) for value in values)
    size = max(abs(first), abs(second))
    if not size.is_finite:
        return True
    return bool(abs(first - second) <= tolerance * size)


def _ordered(elements: Any) -> list[Any]:
    import sympy

    values = list(elements.args)
    return (
        values
        if isinstance(elements, sympy.Tuple)
        else list(sympy.ordered(values, keys=lambda value: value.evalf(), default=True))
    )
