"""Disk space: whether the checkpoints of a run fit, and the system's reason when a write fails."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax.config import RunConfig
from cfprm_jax.errors import UserError

# Checkpoints are compressed: trained weights and moments to 0.93 of their bytes in float32, and to 0.90 as the compact
# optimizer holds them; rows of the embedding whose tokens never came, bfloat16 numbers with moments of zero, to 0.16
# and 0.26. In a 0.5B model, a quarter of it embedding, that makes 0.75 where a corpus has an eighth of the tokens.
_LEAST_SHARE = 0.7


def checkpoints_at_a_time(config: RunConfig, num_steps: int) -> int:
    """The largest number of a run's checkpoints that are on the disk at a time.

    The newest --keep_checkpoints, the best, and the one that is being written: the oldest goes when that is complete,
    and never are two being written. A short run does not make as many.
    """
    best = config.keep_best != "none"
    made = -(-num_steps // config.checkpoint_every)
    if best and config.eval_every:
        made += num_steps // config.eval_every
    return min(config.keep_checkpoints + best + 1, made)


def require_room(
    output_dir: pathlib.Path, abstract_state: Any, config: RunConfig, num_steps: int, present: int = 0
) -> str:
    """A note if a run's checkpoints may not fit its disk; empty if they do.

    Args:
      abstract_state: what a checkpoint holds; anything with shapes and types.
      present: checkpoints of the run that are there already.

    Raises:
      UserError: they cannot fit, however well they compress.
    """
    each = sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(abstract_state))
    number = checkpoints_at_a_time(config, num_steps)
    missing = max(number - present, 1)  # with more than are kept, there is still the next one to be written
    parent = next(path for path in (output_dir.resolve(), *output_dir.resolve().parents) if path.exists())
    bytes_free = shutil.disk_usage(parent).free
    if bytes_free >= missing * each:
        return ""
    kept = f"--keep_checkpoints={config.keep_checkpoints}" + (
        f" and --keep_best={config.keep_best}" if config.keep_best != "none" else ""
    )
    more = "more " if present else ""
    summary = (
        f"a checkpoint has {size(each)} before compression, {kept} need up to {number} at a time, one of them being "
        f"written, and the disk of {output_dir} has {size(bytes_free)} free for {missing} {more}of them "
        f"({size(missing * each)})"
    )
    if bytes_free < _LEAST_SHARE * missing * each:
        raise UserError(f"--output_dir: {summary}: make room, keep fewer checkpoints, or choose another disk")
    return f"note: {summary}: it may get full"


def free(path: pathlib.Path) -> str:
    """The free space on the disk of a folder, for a message."""
    with contextlib.suppress(OSError):
        return size(shutil.disk_usage(path).free)
    return "an unknown number of bytes"


def size(number: float) -> str:
    """Bytes in words."""
    unit, name = next((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if number >= u or n == "KiB")
    return f"{number / unit:.1f} {name}"


def reason(error: BaseException) -> str:
    """The system's word in an error of TensorStore's or Orbax's, which holds paths and numbers besides."""
    text = " ".join(str(error).split())
    known = re.search(r"No space left on device|Disk quota exceeded|File too large|Read-only file system", text)
    return known[0] if known else text[:300]
