"""cuDNN's flash attention for NVIDIA GPUs, with the tree rule as a mask.

The mask is one bias of 0 or -2^41 in the type of the inputs, [rows, 1, length, length], that all heads and layers
share: 8 MiB a row of 2,048 tokens in bfloat16. The kernel is also marked causal and skips the half above the
diagonal. Logits stay in the kernel, forward and backward.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention.visibility import pad_rows, visible

# Lengths with a remainder of 64 have given NaN gradients beside a mask on Hopper (pytorch issue 196678), odd ones are
# refused: rows that are not whole multiples are padded.
_MULTIPLE = 128


def attention(
    q: Float[Array, "rows length heads head_dim"],
    k: Float[Array, "rows length kv_heads head_dim"],
    v: Float[Array, "rows length kv_heads head_dim"],
    subtree_end: Int[Array, "rows length"],
) -> Float[Array, "rows length heads head_dim"]:
    """See :func:`cfprm_jax.models.attention.attention`."""
    length = q.shape[1]
    (q, k, v), ends = pad_rows((q, k, v), subtree_end, _MULTIPLE)
    mask = visible(ends)[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")
    return out[:, :length]
