"""Regular files: validation that a path is no pipe, device or socket, and search in files of any size."""

from __future__ import annotations

import os
import pathlib
import stat

from cfprm_jax.errors import UserError

_PIECE = 1 << 20  # bytes that are read at a time

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
)


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of a path that is no regular file, in words; None for a regular or a missing file."""
    try:
        mode = pathlib.Path(path).stat().st_mode
    except OSError:
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def check_input(path: str | os.PathLike[str], name: str) -> None:
    """UserError, with the given name of the path, unless it is a regular file: others can be read once, or for ever."""
    kind = kind_of(path)
    if kind is not None:
        raise UserError(f"{name} is {kind}; only files are read, so write it to one first")


def check_output(path: str | os.PathLike[str], flag: str) -> None:
    """UserError for an existing output that is no regular file: rows would be lost in it, or it in the rows."""
    kind = kind_of(path)
    if kind is not None:
        raise UserError(f"{flag}={os.fspath(path)} is {kind}; name a file")


def contains(path: str | os.PathLike[str], *texts: str) -> bool:
    """Whether a file contains all of the texts, in UTF-8; false if it is no regular file. Memory is bounded."""
    path = pathlib.Path(path)
    if not path.is_file():
        return False
    missing = {text.encode() for text in texts if text}
    overlap = max(map(len, missing), default=1) - 1
    with path.open("rb") as file:
        tail = b""
        while missing and (piece := file.read(_PIECE)):
            window = tail + piece
            missing = {text for text in missing if text not in window}
            tail = window[max(len(window) - overlap, 0) :]
    return not missing
