"""The keys of docs/files.md, and whether they are those of a file."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_DOCUMENT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "files.md"
Path = tuple[str, ...]


@functools.cache
def documented(section: str) -> dict[Path, bool]:
    """The paths of a section, and whether each is optional."""
    text = _DOCUMENT.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    rows = [line.split("|") for line in body.splitlines() if line.startswith("| `")]
    return {tuple(key.split(".")): "*optional*" in row[3] for row in rows for key in re.findall(r"`([^`]+)`", row[1])}


def written(value: Any, path: Path = ()) -> Iterator[tuple[Path, bool]]:
    """The paths of the leaves, and whether each is an empty container or null; elements of a list have its path."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from written(inner, (*path, name))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from written(inner, path)
    else:
        yield path, value is None or value in ([], {})


def check(section: str, *values: Any) -> None:
    """Every key of the values is documented, and every documented one is there, unless it is optional.

    The keys inside of an empty container or null cannot be there.
    """
    known, found = documented(section), {one for value in values for one in written(value)}
    undocumented = sorted(".".join(path) for path, empty in found if not any(_is(path, empty, one) for one in known))
    assert not undocumented, f"docs/files.md, {section}, lacks {undocumented}"
    required = [one for one, optional in known.items() if not optional]
    absent = [".".join(one) for one in required if not any(_is(path, empty, one) for path, empty in found)]
    assert not absent, f"docs/files.md, {section}, describes {absent}, which is not written"


def _is(path: Path, empty: bool, known: Path) -> bool:
    """Whether a leaf is a documented one, or inside of it, or may contain it."""
    pairs = zip(known, path, strict=False)
    return (empty or len(path) >= len(known)) and all(one in ("*", other) for one, other in pairs)
