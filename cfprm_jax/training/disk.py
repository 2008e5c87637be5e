"""Whether there is room for what a run writes, and what the system says when there is none."""

from __future__ import annotations

import contextlib
import math
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax.errors import UserError


def require_room(output_dir: pathlib.Path, abstract_state: Any, keep: int) -> str:
    """A note if the disk of a run has little room for its checkpoints; empty if it has enough.

    Raises:
      UserError: not even the first one fits.
    """
    bytes_needed = sum(
        math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(abstract_state)
    )
    parent = next(path for path in (output_dir.resolve(), *output_dir.resolve().parents) if path.exists())
    bytes_free = shutil.disk_usage(parent).free
    told = f"a checkpoint takes up to {size(bytes_needed)}, and the disk of {output_dir} has {size(bytes_free)} free"
    # The moments of a new optimizer are zeros, which compress to nothing; weights hardly compress.
    if bytes_free < bytes_needed / 4:
        raise UserError(f"--output_dir: {told}")
    wanted = (keep + 1) * bytes_needed  # the newest is written before the oldest goes
    return f"note: {told}; with --keep_checkpoints={keep} there are up to {size(wanted)} at a time" * (
        bytes_free < wanted
    )


def free(path: pathlib.Path) -> str:
    """What is free on the disk of a folder, in words."""
    with contextlib.suppress(OSError):
        return size(shutil.disk_usage(path).free)
    return "an unknown number of bytes"


def size(number: float) -> str:
    """Bytes in words."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def reason(error: BaseException) -> str:
    """The system's word in an error of TensorStore's or Orbax's, which holds paths and numbers besides."""
    text = " ".join(str(error).split())
    known = re.search(r"No space left on device|Disk quota exceeded|File too large|Read-only file system", text)
    return known[0] if known else text[:300]
