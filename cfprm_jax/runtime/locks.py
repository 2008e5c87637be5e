"""Locks between processes, held by an open file: they end with the process, however it ends.

On a file system without locks every lock is granted: no worse than not asking.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any


def acquire(file: IO[Any], wait: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds it and wait is False."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def opened(path: str | pathlib.Path, mode: str = "ab", wait: bool = False) -> Iterator[IO[Any] | None]:
    """An open file that is locked, and that still has this name; None if another process has locked it.

    Args:
      wait: until the other process lets go of it.
    """
    path = pathlib.Path(path)
    while True:
        with path.open(mode) as file:
            granted = acquire(file, wait)
            if granted and not _has_name(file, path):  # it was renamed or deleted between opening and locking
                continue
            yield file if granted else None
            return


@contextlib.contextmanager
def held(path: str | pathlib.Path, wait: bool = False, remove: bool = False) -> Iterator[bool]:
    """Hold the lock that is a file of its own, which is made; yields False if another process holds it.

    Args:
      wait: until the other process lets go of it.
      remove: delete the file at the end.
    """
    with opened(path, wait=wait) as file:
        try:
            yield file is not None
        finally:
            # While it is locked: a process that has opened it meanwhile detects that the name is gone.
            if remove and file is not None and _has_name(file, pathlib.Path(path)):
                pathlib.Path(path).unlink(missing_ok=True)


def _has_name(file: IO[Any], path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
