"""Attention over a forest of token trees: the one call that every layer makes.

The visibility rule is that of the row format (DESIGN, "Prefix-tree packing"): with the tokens of a row in depth-first
order, token i sees token j iff j <= i < subtree_end[j]. It is the causal mask, the isolation of packed samples and the
sharing of prefixes at once. Padding has subtree_end[i] = i + 1 and sees itself, so no token is without a visible one.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from cfprm_jax.errors import UserError
from cfprm_jax.models.attention import xla
from cfprm_jax.models.attention.xla import visible

__all__ = ["BACKENDS", "attention", "visible"]

BACKENDS = ("auto", "xla")


def attention(
    q: Float[Array, "rows length heads head_dim"],
    k: Float[Array, "rows length kv_heads head_dim"],
    v: Float[Array, "rows length kv_heads head_dim"],
    subtree_end: Int[Array, "rows length"],
    backend: str = "xla",
) -> Float[Array, "rows length heads head_dim"]:
    """Scaled dot-product attention under the tree rule, with grouped keys and values.

    Query head h reads key and value head h // (heads / kv_heads). The scale is head_dim ** -0.5, the softmax is in
    float32, and the result has q's dtype. Products of float32 inputs have full float32 precision on every platform.

    Args:
      backend: "xla" runs everywhere; "auto" takes the best one that is implemented for this platform.

    Raises:
      UserError: the backend is not one of BACKENDS.
    """
    if backend not in BACKENDS:
        raise UserError(f"attention: {backend!r} is not among: {', '.join(BACKENDS)}")
    return xla.attention(q, k, v, subtree_end)
