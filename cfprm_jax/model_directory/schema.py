"""Schemas of JSON fields: types with bounds, and one function that validates a value.

A schema is a dict of fields by name. Each field has a :class:`Kind`, and is required or not. :func:`check` finds the
first value that is not of its kind and names it, what was found and what was expected. The schemas of the files of a
model directory are in :mod:`.file_schemas`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cfprm_jax.errors import UserError

# Of a value that is shown in an error.
_SHOWN_CHARACTERS = 60
NOTHING = object()


class Fault(NamedTuple):
    """An invalid value: its place, such as "model.vocab" or "weights[3]", the value, and what is expected."""

    at: str
    value: Any
    expected: str

    def __str__(self) -> str:
        return f"{self.at}: expected {self.expected}, found {shown(self.value)}"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of values.

    Attributes:
      expected: its name in an error: "a text", "a whole number from 1 to 1,024".
      fault: of (value, its place): what is wrong first, or None.
    """

    expected: str
    fault: Callable[[Any, str], Fault | None]


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of an object.

    Attributes:
      required: whether the object must have it.
      null: whether null stands for a field that is not there.
    """

    kind: Kind
    required: bool = False
    null: bool = False


Schema = Mapping[str, Field]


def required(kind: Kind) -> Field:
    """A field that must be there."""
    return Field(kind, required=True)


def optional(kind: Kind) -> Field:
    """A field that may be absent or null."""
    return Field(kind, null=True)


def may_lack(kind: Kind) -> Field:
    """A field that may be absent, but not null."""
    return Field(kind)


def _plain(expected: str, holds: Callable[[Any], bool]) -> Kind:
    return Kind(expected, lambda value, at: None if holds(value) else Fault(at, value, expected))


def whole(lower: int, upper: int) -> Kind:
    """An int within inclusive bounds, and no bool."""
    name = "a positive whole number" if lower == 1 else f"a whole number from {lower:,}"
    return _plain(f"{name} up to {upper:,}", lambda value: type(value) is int and lower <= value <= upper)


def number(lower: float, upper: float, *, above: bool = False) -> Kind:
    """A finite int or float within bounds, inclusive but for lower with above."""
    name = "a positive number" if above and lower == 0 else f"a number {'above' if above else 'from'} {lower:g}"

    def holds(value: Any) -> bool:
        if type(value) not in (int, float):
            return False
        return (lower < value if above else lower <= value) and value <= upper

    return _plain(f"{name} up to {upper:g}", holds)


def text(most: int = 1 << 20, *, empty: bool = True) -> Kind:
    """A str of up to `most` characters."""
    name = "a text" if empty else "a text that is not empty"
    return _plain(
        name if most >= 1 << 20 else f"{name}, of up to {most:,} characters",
        lambda value: isinstance(value, str) and len(value) <= most and (empty or bool(value)),
    )


TEXT = text()
BOOLEAN = _plain("true or false", lambda value: isinstance(value, bool))
ANYTHING = _plain("anything", lambda value: True)


def one_of(*values: Any) -> Kind:
    """One of a few values, of the same type."""
    return _plain(
        " or ".join(map(shown, values)), lambda value: any(type(value) is type(v) and value == v for v in values)
    )


def either(*kinds: Kind) -> Kind:
    """A value of any of several kinds."""
    expected = " or ".join(kind.expected for kind in kinds)

    def fault(value: Any, at: str) -> Fault | None:
        faults = [kind.fault(value, at) for kind in kinds]
        if None in faults:
            return None
        # A fault in an element is more specific than one of its list.
        return next((found for found in faults if found is not None and found.at != at), Fault(at, value, expected))

    return Kind(expected, fault)


def list_of(kind: Kind, shortest: int = 0, longest: int | None = None) -> Kind:
    """A list whose elements are all of one kind."""
    length = f" of {shortest}" if shortest == longest else "" if longest is None else f" of up to {longest:,}"
    name = f"a list{length}" if kind is ANYTHING else f"a list{length}, each {kind.expected}"

    def fault(value: Any, at: str) -> Fault | None:
        if not isinstance(value, list) or not shortest <= len(value) <= (len(value) if longest is None else longest):
            return Fault(at, value, name)
        faults = (kind.fault(element, f"{at}[{i}]") for i, element in enumerate(value))
        return next((found for found in faults if found is not None), None)

    return Kind(name, fault)


def mapping(kind: Kind, names: Kind = TEXT) -> Kind:
    """An object with any names, whose values are all of one kind."""

    def fault(value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        for name, inner in value.items():
            where = f"{at}.{name[:_SHOWN_CHARACTERS]}"
            found = names.fault(name, where) or kind.fault(inner, where)
            if found is not None:
                return found
        return None

    return Kind("an object", fault)


def record(fields: Schema, *, closed: bool = False) -> Kind:
    """An object with these fields; closed, with no others."""

    def fault(value: Any, at: str) -> Fault | None:
        if not isinstance(value, dict):
            return Fault(at, value, "an object")
        prefix = f"{at}." if at else ""
        for name, field in fields.items():
            inner = value.get(name, NOTHING)
            if inner is NOTHING or (inner is None and field.null):
                found = Fault(f"{prefix}{name}", inner, field.kind.expected) if field.required else None
            else:
                found = field.kind.fault(inner, f"{prefix}{name}")
            if found is not None:
                return found
        other = next((name for name in value if name not in fields), None) if closed else None
        if other is not None:
            return Fault(f"{prefix}{other[:_SHOWN_CHARACTERS]}", value[other], f"only {', '.join(fields)} here")
        return None

    return Kind("an object", fault)


def check(value: Any, schema: Schema, where: str = "") -> None:
    """Raise a UserError that names the first field that is not of its kind, after where."""
    fault = record(schema).fault(value, "")
    if fault is not None:
        at = fault.at or "the whole"
        raise UserError(f"{where}{': ' if where else ''}{fault._replace(at=at)}")


def check_value(name: str, value: Any, kind: Kind) -> None:
    """Raise a UserError that names one value."""
    if (fault := kind.fault(value, name)) is not None:
        raise UserError(str(fault))


def of_options(options: type, *, needed: Sequence[str] = (), bounds: Mapping[str, Kind] | None = None) -> Kind:
    """The object that dataclasses.asdict makes of a configuration, from the metadata of its fields.

    Args:
      options: a dataclass whose fields are :func:`cfprm_jax.options.option`.
      needed: fields that must be there; the others have defaults.
      bounds: kinds that are narrower than those of the metadata.
    """
    fields = {}
    for field in dataclasses.fields(options):
        fields[field.name] = Field((bounds or {}).get(field.name) or _of_option(field.metadata), field.name in needed)
    return record(fields, closed=True)


def _of_option(metadata: Mapping[str, Any]) -> Kind:
    kind, lower, upper = metadata["kind"], metadata["lower"], metadata["upper"]
    if kind == "string":
        return one_of(*metadata["choices"]) if metadata["choices"] else TEXT
    if kind == "int":
        return whole(-(2**31) if lower is None else int(lower), 2**31 - 1 if upper is None else int(upper))
    if kind == "float":
        return number(-1e38 if lower is None else lower, 1e38 if upper is None else upper)
    return BOOLEAN if kind == "bool" else list_of(TEXT)


def shown(value: Any) -> str:
    """A value as an error shows it, cut short."""
    if value is NOTHING:
        return "nothing"
    try:
        written = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    except (ValueError, RecursionError):  # a number of thousands of digits, a value nested too deep to be written
        written = type(value).__name__
    return written if len(written) <= _SHOWN_CHARACTERS else f"{written[:_SHOWN_CHARACTERS]}..."
