"""Files that are files: no pipe, device or socket is read or written where a command needs a file."""

from __future__ import annotations

import os
import pathlib
import stat

from cfprm_jax.errors import UserError

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
)


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """What a path is that is no regular file, in words; None for a regular file, or nothing at all."""
    try:
        mode = pathlib.Path(path).stat().st_mode
    except OSError:
        return None
    return next((name for is_kind, name in _KINDS if is_kind(mode)), None)


def check_input(path: str | os.PathLike[str], name: str) -> None:
    """UserError, which calls the path by name, for what is no regular file: it could be read once, or for ever."""
    kind = kind_of(path)
    if kind is not None:
        raise UserError(f"{name} is {kind}; only files are read, so write it to one first")


def check_output(path: str | os.PathLike[str], flag: str) -> None:
    """UserError for an output that is there and is no regular file: rows would be lost in it, or it in the rows."""
    kind = kind_of(path)
    if kind is not None:
        raise UserError(f"{flag}={os.fspath(path)} is {kind}; name a file")
