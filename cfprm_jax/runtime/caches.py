"""Persistent caches for a quick start of later runs: compiled programs and tokenised corpora."""

from __future__ import annotations

import atexit
import functools
import os
import pathlib
import shutil
import sys
import tempfile

import jax

from cfprm_jax.errors import UserError

AUTO = "auto"


def cache_directory(option: str, kind: str) -> pathlib.Path:
    """The directory that an option names; for auto, the kind's own in the user's cache.

    Where the user's cache cannot be written to, auto is a temporary directory, deleted when the process ends.
    """
    if option != AUTO:
        return pathlib.Path(option)
    path, reason = _user_cache(kind)
    return path if path is not None else _temporary(kind, reason)


def use_compile_cache(option: str) -> pathlib.Path | None:
    """Keep compiled programs on disk; a start with the same shapes on the same devices then does not compile again.

    Args:
      option: a path, auto, or empty for no cache. Where the user's cache cannot be written to, auto is no cache.

    Returns:
      The directory, or None without one.

    Raises:
      UserError: the path cannot be made.
    """
    path: pathlib.Path | None = None
    if option == AUTO:
        path, reason = _user_cache("compiled")
        if path is None:
            print(f"note: compiled steps are not kept: {reason} (--compile_cache_dir)", file=sys.stderr)
    elif option:
        path = pathlib.Path(option)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--compile_cache_dir={option}: {error.strerror}") from error
    jax.config.update("jax_compilation_cache_dir", None if path is None else str(path))
    return path


def _user_cache(kind: str) -> tuple[pathlib.Path | None, str]:
    """The directory of a kind in the user's cache, made; or None, and why it cannot be used."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        path = (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "cfprm_jax" / kind
        path.mkdir(parents=True, exist_ok=True)
    except RuntimeError:  # neither HOME nor an entry of the user in the password database
        return None, "there is no home directory"
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}"
    if not os.access(path, os.W_OK | os.X_OK):
        return None, f"{path} is not writable"
    return path, ""


@functools.cache
def _temporary(kind: str, reason: str) -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp(prefix="cfprm_jax_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    print(f"note: {kind} are kept in {path} until the process ends: {reason}", file=sys.stderr)
    return path
