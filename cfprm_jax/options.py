"""Options: fields of frozen dataclasses that carry help text, choices and bounds, and validate themselves.

Each option becomes a flag of the same name (:mod:`cfprm_jax.flags`). A dataclass of options validates itself on
construction (:class:`Options`), so that Python callers get the same errors as users of the flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from cfprm_jax.errors import UserError

_LONGEST_TEXT = 1 << 16


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    lower: float | None = None,
    upper: float | None = None,
    also: float | None = None,
    kind: str | None = None,
) -> Any:
    """A dataclass field that becomes a flag of the same name.

    Args:
      default: its default; determines the flag's type, unless kind is given.
      help: one or two sentences for --help.
      choices: the values allowed, for a string or the entries of a list.
      lower, upper: inclusive bounds; every number of a command has both.
      also: a number outside the bounds that is allowed because it has a meaning of its own, such as "0 is off".
      kind: "string", "int", "float", "bool" or "list" (comma-separated), required where the type of the default is not
        one of these.
    """
    if kind is None:
        kind = {bool: "bool", int: "int", float: "float", str: "string", tuple: "list"}[type(default)]
    metadata = {"help": help, "choices": choices, "lower": lower, "upper": upper, "also": also, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of every configuration dataclass: checks each option against its kind, choices and bounds.

    A subclass with checks of its own calls ``super().__post_init__()`` first.

    Raises:
      UserError: naming the option as its flag, the value, and what was expected.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.metadata:
                object.__setattr__(self, field.name, _checked(f"--{field.name}", value, field.metadata))
            elif isinstance(field.default_factory, type) and not isinstance(value, field.default_factory):
                raise UserError(f"{field.name}={value!r:.80} is no {field.default_factory.__name__}")


def refuse_unused(config: Options, names: Iterable[str], purpose: str) -> None:
    """Refuses options that have no effect beside the others, unless they have their defaults.

    Args:
      names: of fields of config that nothing reads.
      purpose: what they are for, and what was found instead: "--loss=q_ranking, not bce".

    Raises:
      UserError: naming the first of them that has another value.
    """
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name in names:
        value = getattr(config, name)
        if value != fields[name].default:
            raise UserError(f"--{name}={_as_flag(value)} is for {purpose}")


def _as_flag(value: Any) -> str:
    """A value as it is written in a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return _shown(",".join(value) if isinstance(value, tuple) else value)


def _checked(flag: str, value: Any, meta: Any) -> Any:
    """The value of an option; a list becomes a tuple."""
    kind = meta["kind"]
    if kind == "list":
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise UserError(f"{flag}={_shown(value)} is not a list of texts")
        for entry in value:
            _check_text(flag, entry)
        if "" in value:
            raise UserError(f"{flag}={_shown(','.join(value))} has an empty entry")
        _check_choice(flag, value, meta["choices"])
        return tuple(value)
    if kind == "string":
        _check_text(flag, value)
        _check_choice(flag, [value], meta["choices"])
    elif kind == "bool":
        if not isinstance(value, bool):
            raise UserError(f"{flag}={_shown(value)} is neither true nor false")
    else:
        _check_number(flag, value, meta)
    return value


def _check_text(flag: str, text: Any) -> None:
    if not isinstance(text, str):
        raise UserError(f"{flag}: {_shown(text)} is not a text")
    if len(text) > _LONGEST_TEXT:
        raise UserError(
            f"{flag}={_shown(text)} is {len(text):,} characters long, at most {_LONGEST_TEXT:,} are allowed"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{flag}={_shown(text)} is not Unicode text (is it UTF-8?): {error.reason}") from error
    if "\0" in text:
        raise UserError(f"{flag}={_shown(text)} holds a NUL character")


def _check_choice(flag: str, values: Sequence[str], choices: Sequence[str] | None) -> None:
    unknown = [value for value in values if choices is not None and value not in choices]
    if unknown and choices is not None:
        raise UserError(f"{flag}={_shown(','.join(unknown))} is not among: {', '.join(choices)}")


def _check_number(flag: str, value: Any, meta: Any) -> None:
    kinds, name = ((int,), "a whole number") if meta["kind"] == "int" else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UserError(f"{flag}={_shown(value)} is not {name}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{flag}={value} is not a finite number")
    lower, upper = (
        (-math.inf if meta["lower"] is None else meta["lower"]),
        (math.inf if meta["upper"] is None else meta["upper"]),
    )
    also = meta["also"]
    if not (lower <= value <= upper or (also is not None and value == also)):
        other = f" or {also:g}" if also is not None else ""
        shown = [f"{bound:,}" if isinstance(bound, int) else f"{bound:g}" for bound in (lower, upper)]
        raise UserError(f"{flag}={_shown(value)} is outside its bounds: {shown[0]} to {shown[1]}{other}")


def _shown(value: Any) -> str:
    """A value on one line of a message, with an excerpt of a long one."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def whole_number(text: str, flag: str, lower: int, upper: int) -> int:
    """A number that stands in a list or in a text, such as an entry of --seeds.

    Raises:
      UserError: it is no number in digits, or outside the bounds.
    """
    # Python refuses to convert thousands of digits by an exception of its own.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and lower <= int(text) <= upper):
        raise UserError(f"{flag}: {_shown(text)!r} is not a whole number from {lower:,} to {upper:,}")
    return int(text)
