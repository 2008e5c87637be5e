"""One JSON object of a row: strict where Python's decoder is not.

A name that occurs twice in an object, a number beyond a float's range, text with half a character and values nested
deeper than anybody's are refused, so that what is read can be written again as JSON. NaN, which JSON does not have and
other writers put where a value is missing, is read as null.
"""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 64
"""Objects and arrays inside each other that a row may hold: published rows have 6."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.80} occurs twice in one object")
    return value


def _constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
"""Raises a plain ValueError for what JSON or this module does not allow, RecursionError for very deep nesting."""


def reason_against(data: Any) -> str | None:
    """Why a decoded value is no row; None if it is one."""
    if _too_deep(data):
        return f"not JSON that can be read: nested deeper than {DEEPEST}"
    if not isinstance(data, dict):
        return f"expected a JSON object, found {kind(data)}"
    try:
        # JSON can escape half a character; no tokenizer and no UTF-8 file takes that.
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not Unicode: {error.reason}"
    except ValueError:
        return "not JSON that can be read: a number is beyond the range of float64"
    return None


def _too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
