"""The work budget of a chat template: what values, calls, operators and filters cost, and which are refused.

A unit is an iteration, a call, an element of a list, or a hundred characters: a microsecond at most. What would cost
more than is left raises before it is computed. No clock, signal or process is involved, so a template renders or fails
the same in every thread and on every machine.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError, TemplateError

CHARACTERS_A_UNIT = 100
# A published template takes a few hundred units for a question and its system prompt.
_UNITS, _UNITS_A_CHARACTER = 200_000, 20
_MOST_BITS = 4096
_LARGEST_INDENT = 100

_TEXT_METHODS = (
    "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title capitalize casefold swapcase "
    "replace join find rfind index rindex count removeprefix removesuffix partition rpartition isdigit isalpha isalnum "
    "isspace isupper islower isnumeric isdecimal istitle isascii"
)
_METHODS = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset({"items", "keys", "values", "get"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
}

_left: contextvars.ContextVar[list[int] | None] = contextvars.ContextVar("chat_template_budget", default=None)


class TooMuchError(TemplateError):
    """The budget is spent."""


@contextlib.contextmanager
def limited(characters: int) -> Iterator[None]:
    """Charge the work inside the block to a new budget, which grows with the characters of the conversation."""
    token = _left.set([_UNITS + _UNITS_A_CHARACTER * characters])
    try:
        yield
    finally:
        _left.reset(token)


def charge(units: int) -> None:
    """Take units from the budget; TooMuchError if there are not enough. Free outside of :func:`limited`."""
    left = _left.get()
    if left is not None:
        left[0] -= units
        if left[0] < 0:
            raise TooMuchError("it computes too much: a loop or a text that grows without end?")


def charge_characters(count: int) -> None:
    """Charge for a text of count characters."""
    charge(1 + count // CHARACTERS_A_UNIT)


def weigh(value: Any, *, printed: bool = False) -> None:
    """Charge for traversing a value; with printed, also reject a type without a text form."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            charge_characters(len(one))
        elif isinstance(one, list | tuple):
            charge(1 + len(one))
            waiting.extend(one)
        elif isinstance(one, dict):
            charge(1 + len(one))
            waiting.extend(itertools.chain(one, one.values()))
        elif printed and not (one is None or isinstance(one, bool | int | float | range | jinja2.Undefined)):
            raise SecurityError(f"it prints a {type(one).__name__}")
        else:
            charge(1 + (len(one) if isinstance(one, range) else 0))


def metered(values: Iterable[Any]) -> Iterator[Any]:
    """Charge for each element as it is taken."""
    for value in values:
        charge(1)
        yield value


def elements(values: Any) -> Any:
    """Charge for the elements of a loop: at once where the length is known, else one by one."""
    if isinstance(values, jinja2.Undefined):
        return values
    try:
        charge(len(values))
    except TypeError:
        return metered(values)
    return values


def check_method(method: Any, args: tuple[Any, ...]) -> None:
    """Charge for a call of a builtin method; SecurityError if it is not supported."""
    owner, name = method.__self__, method.__name__
    allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"{type(owner).__name__}.{name} is not supported in chat templates")
    for value in (owner, *args):
        if not isinstance(value, Iterator):
            weigh(value)
    if name in ("split", "rsplit", "splitlines"):
        charge(len(owner))
    elif name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        charge_characters((owner.count(args[0]) if args[0] else len(owner) + 1) * len(args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        charge_characters(len(args[0]) * len(owner))


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Charge for the result of an operator, or reject one that is too large to be computed."""
    sequence = str | list | tuple
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(abs(right), 1)}
        if bits.get(operator, 0) > _MOST_BITS:
            raise TooMuchError(f"{operator} makes a number of more than {_MOST_BITS} bits")
    elif operator == "*" and isinstance(left, int) and isinstance(right, sequence):
        charge(max(left, 0) * (1 + len(right)))
    elif operator == "*" and isinstance(right, int) and isinstance(left, sequence):
        charge(max(right, 0) * (1 + len(left)))
    elif operator == "%" and isinstance(left, str):
        if re.search(r"%[^a-zA-Z%]*(\d{3}|\*)", left):
            raise SecurityError("% with a width is not supported in chat templates")
        weigh(left)
        weigh(right, printed=True)
    elif operator == "+" and isinstance(left, sequence) and isinstance(right, sequence):
        for value in (left, right):
            charge_characters(len(value)) if isinstance(value, str) else charge(1 + len(value))


def paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with charges for its arguments and its result."""
    # jinja2 passes an environment or a context first to functions marked for it.
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def paid(*args: Any, **options: Any) -> Any:
        values = list(args)
        if len(values) > first:
            if isinstance(values[first], Iterator):
                values[first] = metered(values[first])
                if name == "join":
                    values[first] = list(values[first])
            if not isinstance(values[first], Iterator):
                weigh(values[first], printed=name in ("string", "tojson", "join", "trim", "e", "escape"))
        _check_filter(name, values[first:], options)
        result = function(*values, **options)
        if isinstance(result, str | list | dict | tuple):
            weigh(result)
        return result

    return paid


def _check_filter(name: str, values: list[Any], options: dict[str, Any]) -> None:
    numbers = [v for v in (*values[1:], *options.values()) if isinstance(v, int)]
    if name in ("indent", "tojson") and any(abs(number) > _LARGEST_INDENT for number in numbers):
        raise SecurityError(f"{name} by more than {_LARGEST_INDENT} is not supported in chat templates")
    if name == "indent" and values and isinstance(values[0], str):
        width = next((v for v in (*values[1:2], options.get("width")) if v is not None), 4)
        charge_characters((values[0].count("\n") + 1) * (len(width) if isinstance(width, str) else _LARGEST_INDENT))
    elif name == "replace" and len(values) > 2:
        text, old, new = (str(value) for value in values[:3])
        charge_characters((text.count(old) if old else len(text) + 1) * len(new))
    elif name == "join" and values and hasattr(values[0], "__len__"):
        separator = values[1] if len(values) > 1 else options.get("d", "")
        charge_characters(len(values[0]) * len(str(separator)))
