"""Stored tensors to one parameter on its devices, with little more host memory than the parameter itself needs.

Every byte is read once, whatever number of devices hold a piece of it, by a few threads at a time. On CPU devices the
parameter is host memory: its buffers are filled straight from the files and taken over by JAX without a copy. On
accelerators a stacked parameter is born on the devices and filled layer by layer, so that the host holds two layers of
it at most, one being read and one under way.
"""

from __future__ import annotations

import concurrent.futures
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cfprm_jax.models.parameters import ParamSpec
from cfprm_jax.models.safetensors_files import DTYPES, StoredTensor

# Rows that one thread reads at a time come to about as many bytes: enough of them to keep every thread busy within one
# large tensor, few enough that starting one costs nothing beside it.
_JOB_BYTES = 32 << 20
# More threads than this gain nothing from a disk or the page cache.
_MOST_THREADS = 8

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) in every dimension."""


class _Target(NamedTuple):
    """Where a piece of a tensor belongs: which rows and columns of it, and the memory for them."""

    bounds: Bounds
    memory: np.ndarray


def load_param(
    spec: ParamSpec, tensors: Sequence[StoredTensor], dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """One parameter, cast to dtype.

    Args:
      tensors: the stored tensors that hold it, of the right shapes; one a layer for a stacked parameter.
      sharding: where it goes; None is the default device, uncommitted.

    Raises:
      UserError: a file has become shorter.
    """
    if spec.stacked and not _on_host(sharding):
        layer_sharding = _layer_sharding(sharding)
        if layer_sharding is not None or sharding is None:
            return _layer_by_layer(spec, tensors, dtype, sharding, layer_sharding)
    return _at_once(spec.shape, tensors, dtype, sharding, stacked=spec.stacked)


def _on_host(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether device memory is host memory."""
    device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
    return device.platform == "cpu"


def _layer_sharding(sharding: jax.sharding.Sharding | None) -> NamedSharding | None:
    """How a single layer of a stacked parameter is split; None if layers themselves are, or it cannot be told."""
    if not isinstance(sharding, NamedSharding):
        return None
    first, *rest = sharding.spec or (None,)
    return NamedSharding(sharding.mesh, PartitionSpec(*rest)) if first is None else None


def _at_once(
    shape: tuple[int, ...],
    tensors: Sequence[StoredTensor],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
    stacked: bool,
) -> jax.Array:
    whole = tuple((0, size) for size in shape)
    if sharding is None:
        pieces = [whole]
    else:
        pieces = [_bounds(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
    buffers = {piece: _aligned_empty(tuple(b - a for a, b in piece), dtype) for piece in pieces}
    jobs: list[tuple[StoredTensor, list[_Target]]] = []
    for layer, tensor in enumerate(tensors):
        targets = []
        for piece, buffer in buffers.items():
            if not stacked:
                targets.append(_Target(piece, buffer))
            elif piece[0][0] <= layer < piece[0][1]:
                targets.append(_Target(piece[1:], buffer[layer - piece[0][0]]))
        jobs.append((tensor, targets))
    _fill(jobs)
    if sharding is None:
        return jax.device_put(buffers[whole])
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[_bounds(index, shape)])


def _layer_by_layer(
    spec: ParamSpec,
    tensors: Sequence[StoredTensor],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
    layer_sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    def put(stack: jax.Array, one: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, one, layer, 0)

    put = jax.jit(put, donate_argnums=0, out_shardings=sharding)
    stack = jax.jit(lambda: jnp.zeros(spec.shape, dtype), out_shardings=sharding)()
    under_way = None
    for layer, tensor in enumerate(tensors):
        one = _at_once(spec.shape[1:], [tensor], dtype, layer_sharding, stacked=False)
        if under_way is not None:
            under_way.block_until_ready()
        stack, under_way = put(stack, one, np.int32(layer)), one
    return stack


def _fill(jobs: Sequence[tuple[StoredTensor, list[_Target]]]) -> None:
    """Read every tensor's rows that some target wants, once, cast to the target's type."""
    parts = [(tensor, targets, *rows) for tensor, targets in jobs for rows in _parts(tensor, targets)]
    threads = min(_MOST_THREADS, os.cpu_count() or 1, len(parts))
    if threads <= 1:
        for part in parts:
            _read_rows(*part)
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(_read_rows, *part) for part in parts]:
            done.result()


def _parts(tensor: StoredTensor, targets: Sequence[_Target]) -> Iterator[tuple[int, int]]:
    if not targets:
        return
    first, last = min(t.bounds[0][0] for t in targets), max(t.bounds[0][1] for t in targets)
    row_bytes = DTYPES[tensor.dtype].itemsize * math.prod(tensor.shape[1:])
    step = max(1, _JOB_BYTES // row_bytes)
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _read_rows(tensor: StoredTensor, targets: Sequence[_Target], first: int, last: int) -> None:
    whole_row = tuple((0, size) for size in tensor.shape[1:])
    if len(targets) == 1 and targets[0].bounds[1:] == whole_row and targets[0].memory.dtype == DTYPES[tensor.dtype]:
        # Whole rows in the stored type: from the file into their place, with no buffer between.
        start = targets[0].bounds[0][0]
        tensor.read_into(first, targets[0].memory[first - start : last - start])
        return
    for start, rows in tensor.chunks(first, last):
        for bounds, memory in targets:
            low, high = max(start, bounds[0][0]), min(start + len(rows), bounds[0][1])
            if low < high:
                columns = tuple(slice(a, b) for a, b in bounds[1:])
                piece = rows[(slice(low - start, high - start), *columns)]
                _copy(piece, memory[low - bounds[0][0] : high - bounds[0][0]])


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    if source.dtype == target.dtype:
        # NumPy copies a type that is not its own, as bfloat16, element by element.
        plain = np.dtype(f"u{source.dtype.itemsize}")
        source, target = source.view(plain), target.view(plain)
    target[...] = source


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    whole = (slice(None),) * len(shape)
    return tuple(s.indices(size)[:2] for s, size in zip(index or whole, shape, strict=True))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes, which JAX on CPU takes over without a copy."""
    # Mapped by itself, which begins at a page. NumPy would ask for huge pages, and the system may have to make room for
    # those by moving others, which can take longer than reading the file does.
    raw = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape)


def place(value: np.ndarray, sharding: Any) -> jax.Array:
    """A small array that is on the host already, such as a row of a head."""
    if sharding is None:
        return jax.device_put(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
