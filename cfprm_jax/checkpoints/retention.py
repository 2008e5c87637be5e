"""Retention of checkpoints: the newest few, the best one, and damaged ones under another name.

Each change is one rename, so that a process that dies in the middle of one leaves nothing that looks like a checkpoint
and is none.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cfprm_jax.config.shared import EVAL_METRICS
from cfprm_jax.runtime import atomic

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory, each named by its step."""

BEST = "best"
"""Link in a run directory to its best checkpoint by --keep_best."""

HIGHER_IS_BETTER = {metric: metric != "loss" for metric in EVAL_METRICS}
"""The evaluation metrics that can rank checkpoints, and whether higher is better."""

_REMOVED = ".removed"
# Tries to delete what other threads still write into, seconds between them, and how many must find nothing.
_TRIES, _BETWEEN_TRIES, _QUIET = 50, 0.1, 3
_LEFTOVER = re.compile(r"(\d+)\.(orbax-checkpoint-tmp.*|removed)")


def complete(folder: pathlib.Path) -> list[int]:
    """Steps of the complete checkpoints, ascending; the folder may not exist."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())  # one being written or removed has a longer name


def clear_unfinished(folder: pathlib.Path, step: int | None = None) -> None:
    """Delete what saves and removals that were cut short have left, of one step or of all."""
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and step in (None, int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def clear_failed(folder: pathlib.Path, step: int) -> None:
    """Delete what a save has left that has just failed, while its other threads may still be writing."""
    quiet = 0
    for _ in range(_TRIES):
        clear_unfinished(folder, step)
        time.sleep(_BETWEEN_TRIES)
        quiet = quiet + 1 if not any(folder.glob(f"{step}.*tmp*")) else 0
        if quiet == _QUIET:
            break


def remove(folder: pathlib.Path, steps: Iterable[int]) -> None:
    """Delete checkpoints."""
    for step in steps:
        # On a file system that several machines share, a file may be open elsewhere: what stays goes at the next start.
        with contextlib.suppress(OSError):
            gone = folder / f"{step}{_REMOVED}"
            atomic.rename(folder / str(step), gone)
            shutil.rmtree(gone, ignore_errors=True)


def set_aside(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Rename a damaged checkpoint, so that it is not taken for a checkpoint; returns its new path."""
    names = (f"{step}.damaged" + (f".{number}" if number else "") for number in range(1000))
    free = next(folder / name for name in names if not (folder / name).exists())
    atomic.rename(folder / str(step), free)
    return free


def value(metric: str, metrics: Mapping[str, Any] | None) -> float:
    """The metric of an evaluation as a number to maximise; -inf without one."""
    number = (metrics or {}).get(metric)
    if number is None or math.isnan(number):
        return -math.inf
    return float(number) if HIGHER_IS_BETTER[metric] else -float(number)


def best(steps: Iterable[int], metrics: Callable[[int], Mapping[str, Any] | None], metric: str) -> int | None:
    """The step with the best metric, the earliest of equals; None if none has one."""
    found = [(value(metric, metrics(step)), -step) for step in steps]
    top = max(found, default=(-math.inf, 0))
    return None if top[0] == -math.inf else -top[1]


def remove_best(run: pathlib.Path) -> None:
    """Remove the link run/best, if there is one."""
    if (run / BEST).is_symlink():
        (run / BEST).unlink()


def point_to_best(run: pathlib.Path, target: pathlib.Path) -> None:
    """Make run/best a link to a checkpoint."""
    scratch = run / f".{BEST}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target.relative_to(run))
    atomic.rename(scratch, run / BEST)
