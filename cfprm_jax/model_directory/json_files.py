"""Reading of untrusted JSON files: bounded in size and depth, in Unicode, without repeated names in an object."""

from __future__ import annotations

import json
import pathlib
import stat
from typing import Any

from cfprm_jax.errors import UserError

MIB = 1 << 20
# The files that describe a model nest a dozen deep; what parses or prints a thousand levels runs out of stack.
_MOST_LEVELS = 64


def read_object(path: pathlib.Path, most_bytes: int = 16 * MIB, *, repeats: bool = False) -> dict[str, Any]:
    """The JSON object of a file.

    Args:
      most_bytes: a larger file is refused before it is read.
      repeats: whether a name may stand twice in an object; the last one then counts.

    Raises:
      UserError: naming the file: not there, no regular file, too large, not UTF-8, not JSON, or no object.
    """
    return as_object(parse(read_bytes(path, most_bytes), str(path), repeats=repeats), str(path))


def read_bytes(path: pathlib.Path, most_bytes: int) -> bytes:
    """A regular file as a whole.

    Raises:
      UserError: naming the file: not there, no regular file (a pipe would wait for ever), too large, not readable.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: expected a regular file, found {_kind_of_file(status.st_mode)}")
        if status.st_size > most_bytes:
            raise UserError(f"{path}: {status.st_size:,} bytes, expected at most {most_bytes:,}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(f"{path}: not readable: {error}") from error


def parse(data: bytes, where: str, *, repeats: bool = False) -> Any:
    """The value of a JSON text.

    Raises:
      UserError: that begins with where: not UTF-8, not JSON, half a character, a name twice in an object, too deep.
    """
    try:
        # Without blank lines at its end: where a file is cut is on the last line that it has.
        text = data.decode("utf-8").rstrip(" \t\r\n")
        value = json.loads(text, object_pairs_hook=None if repeats else _without_repeats)
        if _is_deeper(value, _MOST_LEVELS):
            raise RecursionError
        # JSON can escape half a character, which no tokenizer and no UTF-8 file takes.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where}: not readable as JSON: nested more than {_MOST_LEVELS} deep") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: not Unicode: {error.reason}") from error
    except ValueError as error:
        raise UserError(f"{where}: not readable as JSON: {error}") from error
    return value


def as_object(value: Any, where: str) -> dict[str, Any]:
    """The value itself. UserError if it is no object."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, found {kind(value)}")
    return value


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {twice[:80]!r} twice")
    return out


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(layer)


def _kind_of_file(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a pipe", stat.S_ISCHR: "a device", stat.S_ISSOCK: "a socket"}
    return next((name for holds, name in kinds.items() if holds(mode)), "something else")
