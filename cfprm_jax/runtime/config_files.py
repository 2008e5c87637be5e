"""Resolved configurations as JSON objects and as flag files, which a command writes beside its output."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_type_hints

from absl import flags

from cfprm_jax.runtime import atomic

Config = TypeVar("Config")

_LISTS = flags.CsvListSerializer(",")


def as_flags(config: Any) -> list[str]:
    """The flags that give this configuration, one a field, in the order of the fields."""
    out = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out += as_flags(value)
        elif field.metadata:
            text = _LISTS.serialize(list(value)) if field.metadata["kind"] == "list" else value
            text = str(text).lower() if field.metadata["kind"] == "bool" else text
            out.append(f"--{field.name}={text}")
    return out


def flag_file(config: Any) -> str:
    """The text of a flag file that gives this configuration."""
    return "".join(f"{quoted(flag)}\n" for flag in as_flags(config))


def quoted(flag: str) -> str:
    """A flag as a line of a flag file; a value that would not survive there is a JSON string."""
    name, _, value = flag.partition("=")
    if value == value.strip() and value.isprintable() and not value.startswith('"'):
        return flag
    # No escape but \uXXXX: a "\times" in quotes, written by hand, is then not of this form and is kept.
    escaped = (c if c.isprintable() and c not in '"\\' else _escaped(c) for c in value)
    return f'{name}="{"".join(escaped)}"'


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def as_dict(config: Any) -> dict[str, Any]:
    """The configuration as one flat JSON object, flag name to value."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(as_dict(value))
        elif field.metadata:
            flat[field.name] = value
    return flat


def from_dict(config_type: type[Config], flat: Mapping[str, Any]) -> Config:
    """The configuration of a flat JSON object, the inverse of :func:`as_dict`; flags that it lacks are the defaults.

    Raises:
      UserError: a value that its flag does not accept.
    """
    values: dict[str, Any] = {}
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(cast(Any, config_type)):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = from_dict(hints[field.name], flat)
        elif field.name in flat:
            value = flat[field.name]
            values[field.name] = tuple(value) if field.metadata.get("kind") == "list" else value
    return config_type(**values)


def write_config(config: Any, directory: str | pathlib.Path) -> None:
    """Write the resolved configuration into directory: config.json, and run.flags, which --flagfile takes."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    atomic.write_json(directory / "config.json", as_dict(config))
    atomic.write_text(directory / "run.flags", flag_file(config))
