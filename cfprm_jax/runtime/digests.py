"""SHA-256 digests of texts, JSON values and files, the same on every machine."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

_READ = 1 << 20
# Folders that downloads and version control keep in a folder for themselves: they hold times and local paths.
_BOOKKEEPING = (".cache", ".git")


def of_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of bytes, concatenated, in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def of_text(text: str) -> str:
    """SHA-256 of a text in UTF-8."""
    return of_parts([text.encode()])


def of_json(value: Any) -> str:
    """SHA-256 of a JSON value; the order of the keys of its objects does not matter."""
    return of_text(json.dumps(value, sort_keys=True))


def sealed(content: Any) -> dict[str, Any]:
    """A JSON value with its digest: what is written where a change on the disk is to be seen."""
    return {"sha256": of_json(content), "content": content}


def unsealed(held: Any) -> Any:
    """The content of :func:`sealed`.

    Raises:
      ValueError: it has no checksum, or is not what the checksum is of.
    """
    if not isinstance(held, dict) or held.keys() != {"sha256", "content"}:
        raise ValueError("has no checksum")
    if held["sha256"] != of_json(held["content"]):
        raise ValueError("has changed: it does not fit its checksum")
    return held["content"]


def of_file(path: str | pathlib.Path) -> str:
    """SHA-256 of the content of a file."""
    with pathlib.Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_span(path: pathlib.Path, begin: int, size: int) -> str:
    """SHA-256 of some bytes of a file, read once in a process unless the file changes: weights are gigabytes."""
    about = path.stat()
    return _of_span(path, begin, size, (about.st_ino, about.st_size, about.st_mtime_ns))


def of_paths(paths: Iterable[pathlib.Path]) -> str:
    """SHA-256 of files, and of folders of files: names in a folder, sizes, and contents.

    .cache and .git in a folder do not count: hf download --local-dir writes the time of the download there. All other
    bytes count, of gigabytes of weights too: two models may differ in one row of their embedding alone.
    """
    return of_parts(part for path in paths for part in _parts(path))


def raw(text: str) -> bytes:
    """The 32 bytes of the digest of a text in UTF-8."""
    return hashlib.sha256(text.encode()).digest()


@functools.cache
def _of_span(path: pathlib.Path, begin: int, size: int, version: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(begin)
        while size and (piece := file.read(min(size, _READ))):
            digest.update(piece)
            size -= len(piece)
    return digest.hexdigest()


def _parts(path: pathlib.Path) -> Iterator[bytes]:
    files = [path]
    if path.is_dir():
        counted = (p for p in path.rglob("*") if p.relative_to(path).parts[0] not in _BOOKKEEPING)
        files = sorted(p for p in counted if p.is_file())
    for file in files:
        size = file.stat().st_size
        yield f"{file.relative_to(path) if path.is_dir() else ''}\n{size}\n".encode()
        with file.open("rb") as content:
            while piece := content.read(_READ):
                yield piece
