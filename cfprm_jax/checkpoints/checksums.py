"""Checksums of a train state, which detect any changed bit and any change of place.

Orbax's files check their own structure, but not the arrays in them: a bit that flips on a disk comes back as another
weight without a word. So a checkpoint holds a checksum of every array, computed where the array is, before it is
written and after it is read. It is the sum modulo 2^32 of mix(bits of the element xor place of the element): addition
has no order, so any mesh gives the same; mix is a bijection, so no change of one element escapes; and values that have
changed places give another sum.

Checkpoints of earlier versions have the sum of the bits alone, without the places. They are compared by that.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.checkpoints import orbax_files

METHOD = "place"
"""The value of "checksum_method" in the meta item of a checkpoint; earlier versions have none."""

# Arrays that an error names; the rest are counted.
_NAMED = 5
# Of the golden ratio: places along each axis begin somewhere else.
_AXIS = 0x9E3779B9


def of_state(state: Any) -> dict[str, int]:
    """Name of each array of a tree -> checksum. All processes that hold a part of it must call this."""
    return _of_arrays(_flat(state), METHOD)


def recorded(state: Any) -> dict[str, Any]:
    """The checksums of a state, for the meta item of its checkpoint."""
    return {"checksums": of_state(state), "checksum_method": METHOD}


def verify(checkpoint: pathlib.Path, state: Any, meta: Mapping[str, Any]) -> None:
    """Compare what was read with what was saved. All processes that hold a part of it must call this.

    Args:
      state: all of what was saved, or a part of the tree.
      meta: the item of the checkpoint.

    Raises:
      DamagedError: an array is another one than what was saved, or has no checksum.
    """
    saved, method = meta.get("checksums", {}), meta.get("checksum_method")
    if method not in (METHOD, None):
        raise orbax_files.DamagedError(
            f"checkpoint {checkpoint} has checksums of another version ({method!r}, expected {METHOD!r})"
        )
    wrong = [name for name, value in _of_arrays(_flat(state), method).items() if saved.get(name) != value]
    if not wrong:
        return
    named = ", ".join(wrong[:_NAMED]) + (f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else "")
    why = f"changed on disk: {named}"
    if not all(name in saved for name in wrong):
        why = f"{checkpoint / 'meta' / orbax_files.JSON_FILE} has no checksum of some of: {named}"
    raise orbax_files.DamagedError(f"checkpoint {checkpoint} is damaged: {why}")


def note(checkpoint: pathlib.Path, meta: Mapping[str, Any]) -> str:
    """A note about a checkpoint whose checksums are of an earlier version; empty for others."""
    if meta.get("checksum_method") is not None:
        return ""
    return f"checkpoint {checkpoint} is of an earlier version: the values of its arrays are checked, their order is not"


def _flat(state: Any) -> dict[str, jax.Array]:
    return {name: leaf for name, leaf in ocp.tree.to_flat_dict(state, sep="/").items() if isinstance(leaf, jax.Array)}


def _of_arrays(arrays: dict[str, jax.Array], method: str | None) -> dict[str, int]:
    meshes = {leaf.sharding.mesh for leaf in arrays.values() if isinstance(leaf.sharding, NamedSharding)}
    sums = _summing(meshes.pop() if len(meshes) == 1 else None, method)(arrays)
    return {name: int(value) for name, value in jax.device_get(sums).items()}


@functools.cache
def _summing(mesh: Mesh | None, method: str | None) -> Any:
    one: Callable[[jax.Array], jax.Array] = _placed_sum if method == METHOD else _bare_sum
    # Replicated, so that every process can read them.
    return jax.jit(
        lambda arrays: {name: one(_bits(array)) for name, array in arrays.items()},
        out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()),
    )


def _bits(array: jax.Array) -> jax.Array:
    """uint32, with one more axis for types of 64 bits."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * min(array.dtype.itemsize, 4)}"))
    return bits.astype(jnp.uint32)


def _bare_sum(bits: jax.Array) -> jax.Array:
    return jnp.sum(bits, dtype=jnp.uint32)


def _placed_sum(bits: jax.Array) -> jax.Array:
    place = jnp.uint32(0)
    for axis, length in enumerate(bits.shape):
        along = _mix(jnp.arange(length, dtype=jnp.uint32) + jnp.uint32(_AXIS * (axis + 1) % 2**32))
        place = place + along.reshape([-1 if other == axis else 1 for other in range(bits.ndim)])
    return jnp.sum(_mix(bits ^ place), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3, a bijection of 32 bits in which each bit depends on all."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
