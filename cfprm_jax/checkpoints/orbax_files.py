"""Access to Orbax's files: one error for all of Orbax's, comparison of arrays by name, and quiet loggers.

An item of a checkpoint that is JSON is one file, {"sha256": ..., "content": ...}: its own checksum.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import pathlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, digests

JSON_FILE = "metadata"
"""Name of the file of a JSON item, in the folder of the item."""


_TOO_LATE = "Event loop is closed"


class DamagedError(UserError):
    """A checkpoint whose files are missing, unreadable, or not what was written."""


def quiet_orbax() -> None:
    """Keep Orbax from printing the traceback of a failed save three times over; the error itself is raised here."""
    logger = logging.getLogger("absl")
    if _is_not_orbax not in logger.filters:
        logger.addFilter(_is_not_orbax)
        # Of several writers one raises, and the event loop is closed; the others end later, each with a complaint of
        # its own: of the loop, of the future that waits for it, of the task that is collected, or of the thread.
        for name in ("asyncio", "concurrent.futures"):
            logging.getLogger(name).addFilter(_is_no_late_writer)
        sys.unraisablehook = functools.partial(_unless_too_late, sys.unraisablehook)
        threading.excepthook = functools.partial(_unless_too_late, threading.excepthook)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in pathlib.PurePath(record.pathname).parts or record.exc_info is None


def _is_no_late_writer(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return not record.getMessage().startswith("Task was destroyed but it is pending!")
    if str(record.exc_info[1]) == _TOO_LATE:
        return False
    frames = traceback.extract_tb(record.exc_info[2])
    return not any("orbax" in pathlib.PurePath(frame.filename).parts for frame in frames)


def _unless_too_late(hook: Callable[[Any], object], raised: Any) -> None:
    if str(raised.exc_value) != _TOO_LATE:
        hook(raised)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Let what is collected meanwhile complain unheard."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


def read_json(folder: pathlib.Path, item: str) -> dict[str, Any]:
    """An item of a checkpoint that is one JSON object.

    Raises:
      DamagedError: its file is missing, is no JSON, has no checksum, or its content does not match its checksum.
    """
    path = folder / item / JSON_FILE
    with damaged(folder):
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedError(f"checkpoint {folder} is damaged: {path}: {error}") from None
    try:
        return digests.unsealed(held)
    except ValueError as error:
        raise DamagedError(f"checkpoint {folder} is damaged: {path} {error}") from None


def replace_json(folder: pathlib.Path, item: str, content: Mapping[str, Any]) -> None:
    """Write an item of a complete checkpoint anew, at one stroke."""
    atomic.write_json(folder / item / JSON_FILE, digests.sealed(content), indent=None)


def described(tree: Any) -> dict[str, str]:
    """Name -> "float32 [3, 4]" of every array of a tree; named tuples and dicts alike."""
    flat = ocp.tree.to_flat_dict(tree, sep="/")
    return {
        name: f"{jnp.dtype(leaf.dtype)} {list(leaf.shape)}" for name, leaf in flat.items() if hasattr(leaf, "shape")
    }


def require_equal(where: str, expected: dict[str, str], found: dict[str, str]) -> None:
    """DamagedError that lists every difference between two descriptions of arrays."""
    # Orbax itself restores what is stored, with the stored shapes, without a word.
    differences = [
        f"{name}: expected {expected.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
        for name in dict.fromkeys([*expected, *found])
        if expected.get(name) != found.get(name)
    ]
    if differences:
        raise DamagedError(f"checkpoint {where} does not fit this model and optimizer: {'; '.join(differences)}")


@contextlib.contextmanager
def damaged(checkpoint: pathlib.Path) -> Iterator[None]:
    """Convert Orbax's various errors about missing or damaged files into one DamagedError."""
    fault = None
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Orbax raises bare ones too
        text = " ".join(str(error).split())[:300]
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        # Neither is the checkpoint's fault.
        if any(isinstance(cause, MemoryError | jax.errors.JaxRuntimeError) for cause in causes):
            raise
        if any(isinstance(cause, PermissionError) for cause in causes) or "PERMISSION_DENIED" in text:
            raise UserError(f"checkpoint {checkpoint} cannot be read: {text}") from error
        for cause in causes:
            traceback.clear_frames(cause.__traceback__)
            cause.__traceback__ = None
        fault = f"checkpoint {checkpoint} is damaged: {text}"
    if fault is not None:
        # Reads that were cut off complain when they are collected, so now is the time.
        with unheard():
            gc.collect()
        raise DamagedError(fault)
