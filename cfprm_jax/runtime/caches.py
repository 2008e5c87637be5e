"""Directories that outlive a run, so that the next start is quick: compiled programs and tokenised corpora."""

from __future__ import annotations

import os
import pathlib

import jax

AUTO = "auto"


def cache_directory(option: str, kind: str) -> pathlib.Path:
    """The directory that an option names; for auto, the kind's own in the user's cache."""
    if option != AUTO:
        return pathlib.Path(option)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "cfprm_jax" / kind


def use_compile_cache(option: str) -> pathlib.Path | None:
    """Keep compiled programs on disk; a start with the same shapes on the same devices then does not compile again.

    Args:
      option: a path, auto, or empty for no cache.

    Returns:
      The directory, or None without one.
    """
    if not option:
        jax.config.update("jax_compilation_cache_dir", None)
        return None
    path = cache_directory(option, "compiled")
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path
