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
    # An empty array for the table's type: only arrays may be residuals of the backward pass.
    return take(table, tokens, dtype), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(dtype: Any, kept: tuple[Any, ...], grad: jax.Array) -> tuple[jax.Array, None]:
    tokens, table = kept
    return add_rows(tokens, grad, table.shape[0]).astype(table.dtype), None


take.defvjp(_forward, _backward)


def add_rows(
    tokens: Int[Array, "rows length"], grad: Float[Array, "rows length embed"], vocab: int
) -> Float[Array, "vocab embed"]:
    """For each id below vocab the float32 sum of its tokens' gradients; other ids are dropped.

    On NVIDIA GPUs a scatter adds by atomics, in another order every time, and a thousand markers wait for each other at
    one row. There, tokens are sorted first, and each id's sum is written once.
    """
    tokens, grad = tokens.reshape(-1), grad.reshape(-1, grad.shape[-1]).astype(jnp.float32)
    scatter, in_order = (functools.partial(add, vocab=vocab) for add in (scatter_add, sorted_add))
    return jax.lax.platform_dependent(tokens, grad, cuda=in_order, default=scatter)


def scatter_add(
    tokens: Int[Array, " tokens"], grad: Float[Array, "tokens embed"], vocab: int
) -> Float[Array, "vocab embed"]:
    """Sum by a scatter, in the platform's order."""
    return jnp.zeros((vocab, grad.shape[-1]), jnp.float32).at[tokens].add(grad, mode="drop")


def sorted_add(
    tokens: Int[Array, " tokens"], grad: Float[Array, "tokens embed"], vocab: int
) -> Float[Array, "vocab embed"]:
    """Sum in an order that depends on the tokens alone: a scan over runs of equal ids, whose last place has the sum."""
    order = jnp.argsort(tokens, stable=True)
    tokens, grad = tokens[order], grad[order]
    same = tokens[1:] == tokens[:-1]
    edge = jnp.ones(1, bool)

    def add(left: Any, right: Any) -> Any:
        (start, total), (next_start, more) = left, right
        return start | next_start, jnp.where(next_start[:, None], more, total + more)

    _, sums = jax.lax.associative_scan(add, (jnp.concatenate([edge, ~same]), grad))
    last = jnp.concatenate([~same, edge])
    # Each other place gets a row of its own beyond the table, so that no two write to the same.
    rows = jnp.where(last & (tokens < vocab), tokens, vocab + jnp.arange(len(tokens), dtype=tokens.dtype))
    table = jnp.zeros((vocab, grad.shape[-1]), jnp.float32)
    return table.at[rows].set(sums, mode="drop", unique_indices=True)
