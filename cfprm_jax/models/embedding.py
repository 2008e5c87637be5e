"""Rows of a table by token id, with gradients that are summed in float32 whatever the table's type.

A batch holds the marker a thousand times: a sum of that many bfloat16 gradients in bfloat16 would lose most of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def take(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "rows length"], dtype: Any
) -> Float[Array, "rows length embed"]:
    """The table's row of each token, in dtype."""
    return table[tokens].astype(dtype)


def _forward(table: jax.Array, tokens: jax.Array, dtype: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    # An empty array for the table's type: of a traced value, only arrays may go on to the backward pass.
    return take(table, tokens, dtype), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(dtype: Any, kept: tuple[Any, ...], grad: jax.Array) -> tuple[jax.Array, None]:
    tokens, table = kept
    return add_rows(tokens, grad, table.shape[0]).astype(table.dtype), None


take.defvjp(_forward, _backward)


def add_rows(
    tokens: Int[Array, "rows length"], grad: Float[Array, "rows length embed"], vocab: int
) -> Float[Array, "vocab embed"]:
    """For each id below vocab the float32 sum of its tokens' gradients; other ids are dropped."""
    total = jnp.zeros((vocab, grad.shape[-1]), jnp.float32)
    return total.at[tokens].add(grad.astype(jnp.float32), mode="drop")
