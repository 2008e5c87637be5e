"""Validation of output paths before a command computes anything."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable

from cfprm_jax.errors import UserError


def require_directory(flag: str, directory: pathlib.Path) -> None:
    """Raise UserError unless files can be made in a directory, which need not exist yet; nothing is written.

    Args:
      flag: with its value, for the message.
    """
    # The current directory, for a relative path of which nothing exists.
    nearest = next((path for path in (directory, *directory.parents) if os.path.lexists(path)), pathlib.Path())
    if not nearest.is_dir():
        what = "is a file" if nearest.exists() else "is a link to nothing"
        raise UserError(f"{flag} {what}" if flag.endswith(f"={nearest}") else f"{flag}: {nearest} {what}")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{flag}: {nearest} is not writable")


def require_no_input(flag: str, output: str | pathlib.Path, /, **inputs: Iterable[str | pathlib.Path]) -> None:
    """Raise UserError where an output is one of the files that are read, which it would replace.

    Args:
      flag: of the output, without its value, for the message.
      inputs: the files of each flag.
    """
    resolved = pathlib.Path(output).resolve()
    for name, paths in inputs.items():
        if any(pathlib.Path(path).resolve() == resolved for path in paths):
            raise UserError(f"{flag}={output} is also a file of --{name}: choose another file")


def require_new_directory(flag: str, directory: str | pathlib.Path) -> pathlib.Path:
    """Raise UserError unless a directory is empty or does not exist, and can be written.

    Args:
      flag: without its value, for the message.

    Returns:
      The directory as a path.
    """
    directory = pathlib.Path(directory)
    require_directory(f"{flag}={directory}", directory)
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"{flag}={directory} is not empty: choose a new directory")
    return directory
