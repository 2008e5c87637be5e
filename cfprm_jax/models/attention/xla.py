"""Attention in plain XLA: causal blocks of queries against a dense mask. It runs on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention.visibility import visible

# A block of queries is at least this long. On CPU, 128 was faster forward and backward than 256 and than the whole
# square at lengths 512 and 2048: keys beyond the block's end are never touched, which halves the work.
_BLOCK = 128
# More blocks than this only lengthen compilation.
_MAX_BLOCKS = 16


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
    # Float32 would be rounded to TF32 or bfloat16 on GPU and TPU otherwise.
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    block = max(_BLOCK, -(-length // (_MAX_BLOCKS * _BLOCK)) * _BLOCK)

    mask = visible(subtree_end)[:, None, None]
    # The query heads that share a key head lie in one matrix: one large product instead of `group` small ones.
    q = (q * head_dim**-0.5).astype(q.dtype).reshape(rows, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    outputs = []
    for start in range(0, length, block):
        end = min(start + block, length)
        size = end - start
        queries = q[:, :, :, start:end].reshape(rows, kv_heads, group * size, head_dim)
        logits = jnp.einsum(
            "rkid,rkjd->rkij", queries, k[:, :, :end], precision=precision, preferred_element_type=jnp.float32
        ).reshape(rows, kv_heads, group, size, end)
        logits = jnp.where(mask[..., start:end, :end], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype).reshape(rows, kv_heads, group * size, end)
        output = jnp.einsum("rkij,rkjd->rkid", weights, v[:, :, :end], precision=precision)
        outputs.append(output.reshape(rows, kv_heads, group, size, head_dim))
    return jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)
