"""Blockwise attention for CPU: loops over the pairs of blocks with any visible token pair.

A row's square is cut into blocks of queries by blocks of keys. A block in which no query sees a key is not computed:
that is the half above the diagonal, what lies between different trees, and most of what lies between the branches of
one tree. The softmax runs along a block of queries as its keys come in (Milakov and Gimelshein,
https://arxiv.org/abs/1805.02867), and the backward pass recomputes the weights from the log-sum-exp of each query, so
that nothing of the square outlives a block: what a layer keeps grows with the length of a row and not with its square.

Which pairs are visible is read from subtree_end on the device, so nothing compiles for a particular tree.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention.visibility import list_visible, pad_rows, visible_blocks

# Each loop step costs tens of microseconds beside its arithmetic, which favours large blocks; small ones skip more of a
# tree's invisible pairs.
_BLOCK = 128
# Shorter rows are one block, of a multiple of this.
_SMALL = 16
# Logit of an invisible pair. Finite, so that a query that has seen nothing yet makes no NaN: what it has summed by
# then is multiplied by exp(_MASKED - m) = 0 at its first visible key, and every token sees itself.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def attention(
    q: Float[Array, "rows length heads head_dim"],
    k: Float[Array, "rows length kv_heads head_dim"],
    v: Float[Array, "rows length kv_heads head_dim"],
    subtree_end: Int[Array, "rows length"],
) -> Float[Array, "rows length heads head_dim"]:
    """See :func:`cfprm_jax.models.attention.attention`."""
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    block = min(_BLOCK, -(-length // _SMALL) * _SMALL)
    q = (q * head_dim**-0.5).astype(q.dtype)
    (q, k, v), ends = pad_rows((q, k, v), subtree_end, block)
    blocks = q.shape[1] // block
    # One item a block; the query heads that share a key head lie in one matrix.
    q = q.reshape(rows * blocks, block, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = (x.reshape(rows * blocks, block, kv_heads, head_dim).transpose(0, 2, 1, 3) for x in (k, v))
    out = _blockwise(q.reshape(rows * blocks, kv_heads, group * block, head_dim), k, v, ends, block)
    out = out.reshape(rows, blocks, kv_heads, group, block, head_dim).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(rows, blocks * block, heads, head_dim)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, block: int) -> jax.Array:
    return _forward(q, k, v, ends, block)[0]


def _blockwise_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, lse = _forward(q, k, v, ends, block)
    return out, (q, k, v, ends, out, lse)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """[kv_heads, ...] by [kv_heads, ...] over one dimension of each, float32."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((0,), (0,)))
    return jax.lax.dot_general(
        a.astype(b.dtype), b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The output [items, kv_heads, group * block, head_dim] and the log-sum-exp of each query's logits."""
    items, kv_heads, queries, head_dim = q.shape
    rows = len(ends)
    blocks = items // rows
    listed = list_visible(visible_blocks(ends, block))
    ends = ends.reshape(items, block)
    token = jnp.arange(block)

    def queries_of(item: Any, carry: Any) -> Any:
        out, lse = carry
        row, i = jnp.divmod(item, blocks)
        query = jax.lax.dynamic_index_in_dim(q, item, keepdims=False)
        own = i * block + token[:, None]

        def keys_of(place: Any, sums: Any) -> Any:
            highest, total, mixed = sums
            j = listed.which[item * blocks + place]
            key, value, end = (jax.lax.dynamic_index_in_dim(x, row * blocks + j, keepdims=False) for x in (k, v, ends))
            seen = (j * block + token <= own) & (own < end)
            logits = _dot(query, key, (2, 2)).reshape(kv_heads, -1, block, block)
            logits = jnp.where(seen, logits, _MASKED).reshape(kv_heads, queries, block)
            now = jnp.maximum(highest, logits.max(axis=2))
            weights = jnp.exp(logits - now[..., None])
            fade = jnp.exp(highest - now)
            total = fade * total + weights.sum(axis=2)
            return now, total, fade[..., None] * mixed + _dot(weights, value, (2, 1))

        start = (
            jnp.full((kv_heads, queries), _MASKED),
            jnp.zeros((kv_heads, queries)),
            jnp.zeros((kv_heads, queries, head_dim)),
        )
        highest, total, mixed = jax.lax.fori_loop(0, listed.counts[item], keys_of, start)
        out = jax.lax.dynamic_update_index_in_dim(out, (mixed / total[..., None]).astype(out.dtype), item, 0)
        return out, jax.lax.dynamic_update_index_in_dim(lse, highest + jnp.log(total), item, 0)

    start = jnp.zeros(q.shape, q.dtype), jnp.zeros(q.shape[:3], jnp.float32)
    return jax.lax.fori_loop(0, items, queries_of, start)


def _blockwise_backward(block: int, kept: tuple[jax.Array, ...], grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, ends, out, lse = kept
    items, _, queries, _ = q.shape
    blocks = items // len(ends)
    listed = list_visible(visible_blocks(ends, block))
    ends = ends.reshape(items, block)
    key_of, query_of = jnp.arange(block), jnp.arange(queries) % block
    # Logits are keys by queries here, and dq is head_dim by queries: so no large operand of a product is transposed,
    # for which XLA on CPU has no fast kernel.
    k_columns = k.swapaxes(2, 3)
    # Gradient of the logits is p * (dp - delta), with this delta for each query.
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def queries_of(item: Any, carry: Any) -> Any:
        dq, dk, dv = carry
        row, i = jnp.divmod(item, blocks)
        query, pull, log_sum, own_delta = (
            jax.lax.dynamic_index_in_dim(x, item, keepdims=False) for x in (q, grad, lse, delta)
        )
        own = i * block + query_of

        def keys_of(place: Any, carry: Any) -> Any:
            own_dq, dk, dv = carry
            j = listed.which[item * blocks + place]
            at = row * blocks + j
            key, column, value, end, own_dk, own_dv = (
                jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in (k, k_columns, v, ends, dk, dv)
            )
            seen = (j * block + key_of[:, None] <= own) & (own < end[:, None])
            logits = jnp.where(seen, _dot(key, query, (2, 2)), _MASKED)
            weights = jnp.exp(logits - log_sum[:, None])
            dlogits = weights * (_dot(value, pull, (2, 2)) - own_delta[:, None])
            own_dv = own_dv + _dot(weights, pull, (2, 1))
            own_dk = own_dk + _dot(dlogits, query, (2, 1))
            own_dq = own_dq + _dot(column, dlogits.astype(column.dtype), (2, 1))
            return (
                own_dq,
                jax.lax.dynamic_update_index_in_dim(dk, own_dk, at, 0),
                jax.lax.dynamic_update_index_in_dim(dv, own_dv, at, 0),
            )

        start = jnp.zeros((*k_columns.shape[1:3], queries), jnp.float32), dk, dv
        own_dq, dk, dv = jax.lax.fori_loop(0, listed.counts[item], keys_of, start)
        return jax.lax.dynamic_update_index_in_dim(dq, own_dq.astype(dq.dtype), item, 0), dk, dv

    start = jnp.zeros(q.swapaxes(2, 3).shape, q.dtype), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dq, dk, dv = jax.lax.fori_loop(0, items, queries_of, start)
    return dq.swapaxes(2, 3), dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
