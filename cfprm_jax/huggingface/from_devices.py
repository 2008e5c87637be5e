"""Transfer of a parameter from its devices to rows on the host, a piece at a time, for export.

Pieces are cut on each device by itself, so nothing is gathered between devices, and the host holds one piece. On CPU
devices a piece that needs no cast and lies on one device is a view of the parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# Large enough that neither a device nor a disk notices where one ends, small beside any limit on host memory.
PIECE_BYTES = 64 << 20


def pieces(leaf: jax.Array, dtype: np.dtype, layer: int | None = None) -> Iterator[np.ndarray]:
    """The rows of a parameter, or of one layer of a stacked one, in order and cast to dtype.

    Args:
      leaf: wholly on devices of this process, in any sharding.
      layer: index on axis 0 of a stacked parameter.
    """
    shape = leaf.shape if layer is None else leaf.shape[1:]
    rows = max(1, PIECE_BYTES // max(math.prod(shape[1:]) * max(dtype.itemsize, leaf.dtype.itemsize), 1))
    for start in range(0, shape[0], rows):
        bounds = [(start, min(start + rows, shape[0])), *((0, size) for size in shape[1:])]
        yield _fetch(leaf, dtype, bounds if layer is None else [(layer, layer + 1), *bounds]).reshape(-1, *shape[1:])


def whole(leaf: jax.Array, dtype: np.dtype) -> np.ndarray:
    """All rows at once, of a small parameter."""
    return np.concatenate(list(pieces(leaf, dtype)))


def _fetch(leaf: jax.Array, dtype: np.dtype, bounds: list[tuple[int, int]]) -> np.ndarray:
    """A block of a parameter from the shards that hold it."""
    out: np.ndarray | None = None
    for shard in leaf.addressable_shards:
        if shard.replica_id:
            continue
        held = [s.indices(size)[:2] for s, size in zip(shard.index, leaf.shape, strict=True)]
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, held, strict=True)]
        if any(low >= high for low, high in common):
            continue
        local = tuple((low - first, high - low) for (low, high), (first, _) in zip(common, held, strict=True))
        values = _cut(shard.data, dtype, local)
        if common == bounds:
            return values
        if out is None:
            out = np.empty([stop - start for start, stop in bounds], dtype)
        place = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(common, bounds, strict=True))
        # As plain integers: NumPy copies a type that is not its own, as bfloat16, element by element.
        plain = np.dtype(f"u{dtype.itemsize}")
        out.view(plain)[place] = values.view(plain)
    if out is None:
        raise ValueError(f"no shard on this process holds {bounds} of an array {leaf.shape}")
    return out


def _cut(data: jax.Array, dtype: np.dtype, local: tuple[tuple[int, int], ...]) -> np.ndarray:
    """(start, size) in every dimension of an array on one device."""
    if _on_host(data):
        return np.asarray(data)[tuple(slice(start, start + size) for start, size in local)].astype(dtype, copy=False)
    starts, sizes = zip(*local, strict=True)
    return np.asarray(_cut_on_device(data, np.array(starts, np.int32), sizes, dtype))


def _on_host(data: jax.Array) -> bool:
    return next(iter(data.devices())).platform == "cpu"


@functools.partial(jax.jit, static_argnames=("sizes", "dtype"))
def _cut_on_device(data: jax.Array, starts: Any, sizes: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.lax.dynamic_slice(data, [starts[i] for i in range(data.ndim)], sizes).astype(dtype)
