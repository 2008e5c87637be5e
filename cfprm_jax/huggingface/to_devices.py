"""Transfer of stored tensors to one parameter on its devices, with little host memory beyond the parameter's own.

Every byte is read once, whatever number of devices hold a piece of it, by a few threads at a time. On CPU devices the
parameter is host memory: its buffers are filled straight from the files and taken over by JAX without a copy. On
accelerators a stacked parameter is allocated on the devices and filled layer by layer, so that the host holds at most
two layers of it, one being read and one in transfer. A parameter that is stored in another form (:class:`Conversion`)
is converted during the transfer: the device holds two further layers of it, or one whole unstacked parameter.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cfprm_jax.huggingface.safetensors_files import DTYPES, StoredTensor
from cfprm_jax.models.parameters import ParamSpec

# Rows that one thread reads at a time come to about as many bytes: enough of them to keep every thread busy within one
# large tensor, few enough that starting one costs nothing beside it.
_JOB_BYTES = 32 << 20
# More threads than this gain nothing from a disk or the page cache.
_MOST_THREADS = 8

Bounds = tuple[tuple[int, int], ...]
"""(start, stop) in every dimension."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The conversion of a parameter on its devices, as it is loaded, to a tree of arrays.

    Attributes:
      function: from the parameter to the tree; of one layer of a stacked parameter it makes that layer of every array.
      shardings: of the tree of a whole parameter; None is the default device, uncommitted.
    """

    function: Callable[[jax.Array], Any]
    shardings: Any

    def __call__(self, parameter: jax.Array) -> Any:
        """The tree of a whole parameter that is on the devices."""
        return self.program()(parameter)

    def program(self) -> Any:
        """The conversion as a jitted function."""
        return jax.jit(self.function, out_shardings=self.shardings)


class _Target(NamedTuple):
    """The target of a piece of a tensor: its rows and columns, and the memory for them."""

    bounds: Bounds
    memory: np.ndarray


def load_param(
    spec: ParamSpec,
    tensors: Sequence[StoredTensor],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
    conversion: Conversion | None = None,
) -> Any:
    """One parameter, cast to dtype, or what a conversion makes of it.

    Args:
      tensors: the stored tensors that hold it, of the right shapes; one a layer for a stacked parameter.
      sharding: where it goes; None is the default device, uncommitted.

    Raises:
      UserError: a file has become shorter.
    """
    if _goes_layer_by_layer(spec, sharding):
        return _layer_by_layer(spec, tensors, dtype, sharding, conversion or Conversion(lambda x: x, sharding))
    whole = _at_once(spec.shape, tensors, dtype, sharding, stacked=spec.stacked)
    return whole if conversion is None else conversion(whole)


def load_program(
    spec: ParamSpec, dtype: np.dtype, sharding: NamedSharding, conversion: Conversion
) -> tuple[Any, tuple[Any, ...], int]:
    """The program of :func:`load_param` on accelerators that need not be present, for a plan of their memory.

    Returns:
      A jitted function, its abstract arguments, and how many arrays of the shape of its last but one argument, a layer,
      are on their way to the devices while it runs.
    """
    if not _goes_layer_by_layer(spec, sharding):
        return conversion.program(), (jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),), 0
    zeros, put = _layer_programs(spec.shape, dtype, conversion)
    stack = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(zeros), conversion.shardings
    )
    layer = jax.ShapeDtypeStruct(spec.shape[1:], dtype, sharding=_layer_sharding(sharding))
    return put, (stack, layer, jax.ShapeDtypeStruct((), jnp.int32)), 1


def _goes_layer_by_layer(spec: ParamSpec, sharding: jax.sharding.Sharding | None) -> bool:
    return spec.stacked and not _on_host(sharding) and (sharding is None or _layer_sharding(sharding) is not None)


def _on_host(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether device memory is host memory."""
    device = jax.devices()[0] if sharding is None else next(iter(sharding.device_set))
    return device.platform == "cpu"


def _layer_sharding(sharding: jax.sharding.Sharding | None) -> NamedSharding | None:
    """The sharding of one layer of a stacked parameter; None if layers themselves are split, or it is unknown."""
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


def _layer_programs(shape: tuple[int, ...], dtype: np.dtype, conversion: Conversion) -> tuple[Any, Any]:
    """() -> the tree of a stacked parameter, empty; (tree, layer, its index) -> the tree with the layer, in place."""

    def zeros() -> Any:
        whole = jax.eval_shape(conversion.function, jax.ShapeDtypeStruct(shape, dtype))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole)

    def put(stack: Any, one: jax.Array, layer: jax.Array) -> Any:
        return jax.tree.map(
            lambda into, x: jax.lax.dynamic_update_index_in_dim(into, x, layer, 0), stack, conversion.function(one)
        )

    return (
        jax.jit(zeros, out_shardings=conversion.shardings),
        jax.jit(put, donate_argnums=0, out_shardings=conversion.shardings),
    )


def _layer_by_layer(
    spec: ParamSpec,
    tensors: Sequence[StoredTensor],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None,
    conversion: Conversion,
) -> Any:
    zeros, put = _layer_programs(spec.shape, dtype, conversion)
    stack, under_way = zeros(), None
    for layer, tensor in enumerate(tensors):
        one = _at_once(spec.shape[1:], [tensor], dtype, _layer_sharding(sharding), stacked=False)
        if under_way is not None:
            under_way.block_until_ready()
        stack, under_way = put(stack, one, np.int32(layer)), one
    return stack


def _fill(jobs: Sequence[tuple[StoredTensor, list[_Target]]]) -> None:
    """Read the rows of every tensor that some target needs, once, and cast them to the target's type."""
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
