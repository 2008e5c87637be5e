"""Lookup in an embedding table that is sharded over devices: ids over tensor, width over fsdp.

For some meshes XLA's partitioner gathers the whole batch's activations onto every device (with the warning
"involuntary full rematerialization"). This module therefore writes the communication out: each device looks up its
share of the width for the rows of its fsdp group, the group exchanges rows for width (an all-to-all), and the tensor
group sums, each device contributing zeros for ids outside its shard. The gradient takes the reverse path, and is summed
in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from cfprm_jax.models.embedding import add_rows

_TABLE = PartitionSpec("tensor", "fsdp")
_TOKENS = PartitionSpec(("data", "fsdp"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def take(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "rows length"], dtype: Any, mesh: Mesh
) -> Float[Array, "rows length embed"]:
    """The table's row of each token, in dtype; the rows of the batch are a multiple of data x fsdp devices."""

    def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
        local, held = _local_ids(tokens, table.shape[0])
        part = jnp.where(held[..., None], table[jnp.where(held, local, 0)].astype(dtype), 0)
        return jax.lax.psum(jax.lax.all_to_all(part, "fsdp", 0, 2, tiled=True), "tensor")

    return _per_device(lookup, mesh, (_TABLE, _TOKENS), _TOKENS)(table, tokens)


def _forward(table: jax.Array, tokens: jax.Array, dtype: Any, mesh: Mesh) -> tuple[jax.Array, tuple[Any, ...]]:
    like = jax.lax.with_sharding_constraint(
        jnp.zeros((table.shape[0], 0), table.dtype), NamedSharding(mesh, PartitionSpec("tensor"))
    )
    return take(table, tokens, dtype, mesh), (tokens, like)


def _backward(dtype: Any, mesh: Mesh, kept: tuple[Any, ...], grad: jax.Array) -> tuple[jax.Array, None]:
    tokens, table = kept

    def add(tokens: jax.Array, grad: jax.Array) -> jax.Array:
        vocab = table.shape[0] // mesh.shape["tensor"]
        local, held = _local_ids(tokens, vocab)
        part = jax.lax.all_to_all(grad, "fsdp", 2, 0, tiled=True)
        total = add_rows(jnp.where(held, local, vocab), part, vocab)
        return jax.lax.psum(total, "data").astype(table.dtype)

    return _per_device(add, mesh, (_TOKENS, _TOKENS), _TABLE)(tokens, grad), None


take.defvjp(_forward, _backward)


def _local_ids(tokens: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """The tokens of all rows of the fsdp group, counted from this device's first id, and which of them it holds."""
    rows = jax.lax.all_gather(tokens, "fsdp", tiled=True)
    local = rows - jax.lax.axis_index("tensor") * vocab
    return local, (local >= 0) & (local < vocab)


def _per_device(function: Callable[..., Any], mesh: Mesh, inputs: Any, output: Any) -> Callable[..., Any]:
    # Values and gradients are both written out above, so nothing is differentiated through the shard_map.
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=output, check_vma=False)
