"""Checksums of a train state: what is restored is what was saved, to the bit.

Orbax's files check their own structure, but not the arrays in them: a bit that flips on a disk comes back as another
weight without a word. So a checkpoint holds, for every array, the sum of its elements' bits modulo 2^32. It is computed
where the array is, before it is written and after it is read; addition has no order, so any mesh gives the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def of_state(state: Any) -> dict[str, int]:
    """Name of each array of a tree -> checksum. All processes that hold a part of it must call this."""
    arrays = {name: leaf for name, leaf in ocp.tree.to_flat_dict(state, sep="/").items() if isinstance(leaf, jax.Array)}
    meshes = {leaf.sharding.mesh for leaf in arrays.values() if isinstance(leaf.sharding, NamedSharding)}
    sums = _summing(meshes.pop() if len(meshes) == 1 else None)(arrays)
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def differences(saved: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    """Names of the arrays found whose checksum is another one than what was saved, or was not saved."""
    return [name for name, value in found.items() if saved.get(name) != value]


@functools.cache
def _summing(mesh: Mesh | None) -> Any:
    # Replicated, so that every process can read them.
    return jax.jit(_sums, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def _sums(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _sum(array) for name, array in arrays.items()}


def _sum(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)
