"""Attention over a forest of token trees: the one call that every layer makes, and its backends.

The visibility rule is that of the row format (:mod:`cfprm_jax.data.packing`): with the tokens of a row in depth-first
order, token i sees token j iff j <= i < subtree_end[j]. It is the causal mask, the isolation of packed samples and the
sharing of prefixes at once. Padding has subtree_end[i] = i + 1 and sees itself, so no token is without a visible one.

Every backend honours this rule, for rows of any length. A backend is chosen once, before compilation, for the target
platform (:func:`resolve`): inside a traced function that platform is unknown.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from cfprm_jax.config import ATTENTIONS
from cfprm_jax.errors import UserError
from cfprm_jax.models.attention import blockwise, cudnn, xla
from cfprm_jax.models.attention.visibility import visible
from cfprm_jax.models.placement import Placement, unconstrained

__all__ = ["BACKENDS", "attention", "resolve", "visible"]

BACKENDS = tuple(name for name in ATTENTIONS if name != "auto")

_GPUS = ("gpu", "cuda")
# Hopper's limit; a query of more is split by no kernel here.
_CUDNN_HEAD_DIM = 256


def resolve(
    backend: str, platform: str, dtype: str, heads: int, *, kv_heads: int, head_dim: int, head_parts: int = 1
) -> str:
    """The backend that --attention stands for on a platform.

    Args:
      backend: the value of --attention. "auto" is cudnn on a GPU in bfloat16, pallas on a TPU, and blockwise for the
        rest, or xla on a CPU where the heads are split unevenly.
      platform: of the devices that the computation is compiled for, which may not be this machine's.
      dtype: "bfloat16" or "float32", of the products.
      heads, kv_heads, head_dim: of the network.
      head_parts: devices that the heads are split over.

    Raises:
      UserError: an unknown backend, or one that does not support this network there, with the reason.
    """
    if backend not in ATTENTIONS:
        raise UserError(f"--attention: {backend!r} is not among: {', '.join(ATTENTIONS)}")
    uneven = heads % head_parts or kv_heads % head_parts
    chosen = backend
    if backend == "auto":
        if platform == "tpu":
            chosen = "pallas"
        elif platform in _GPUS and dtype == "bfloat16":
            chosen = "cudnn"
        else:
            # On a GPU xla would hold the logits in memory, so that uneven heads are refused below instead.
            chosen = "xla" if uneven and platform == "cpu" else "blockwise"
    if chosen == "xla":
        return chosen
    if chosen == "cudnn":
        if platform not in _GPUS:
            raise UserError(f"--attention=cudnn is for NVIDIA GPUs, and this runs on {platform}; choose auto or xla")
        if dtype != "bfloat16":
            raise UserError(f"--attention=cudnn computes in bfloat16, not {dtype}; choose --attention=xla")
        if head_dim % 8 or head_dim > _CUDNN_HEAD_DIM:
            raise UserError(
                f"--attention={backend}: cuDNN takes heads of a multiple of 8 up to {_CUDNN_HEAD_DIM}, not {head_dim}; "
                "choose --attention=xla"
            )
    if chosen == "pallas" and platform != "tpu":
        raise UserError(f"--attention=pallas is for TPUs, and this runs on {platform}; choose auto or xla")
    if uneven:
        raise UserError(
            f"--mesh: tensor={head_parts} does not divide the {heads} query heads and {kv_heads} key heads, which "
            f"--attention={chosen} needs; choose a tensor that does, or --attention=xla"
        )
    return chosen


def attention(
    q: Float[Array, "rows length heads head_dim"],
    k: Float[Array, "rows length kv_heads head_dim"],
    v: Float[Array, "rows length kv_heads head_dim"],
    subtree_end: Int[Array, "rows length"],
    backend: str = "xla",
    *,
    placement: Placement = unconstrained,
) -> Float[Array, "rows length heads head_dim"]:
    """Scaled dot-product attention under the tree rule, with grouped keys and values.

    Query head h reads key and value head h // (heads / kv_heads). The scale is head_dim ** -0.5, the softmax is in
    float32, and the result has q's dtype. Products of float32 inputs have full float32 precision on every platform.

    Args:
      backend: one of BACKENDS, as :func:`resolve` gives it.
      placement: how rows and heads are split over devices; kernels run on each device's own.

    Raises:
      UserError: the backend is not one of BACKENDS.
    """
    if backend == "xla":
        return xla.attention(q, k, v, subtree_end)
    if backend not in BACKENDS:
        raise UserError(f"attention: {backend!r} is not among: {', '.join(BACKENDS)}")
    queries, keys = ("rows", "length", "heads", None), ("rows", "length", "kv_heads", None)
    if backend == "blockwise":
        kernel = blockwise.attention
    elif backend == "cudnn":
        kernel = cudnn.attention
    else:
        from cfprm_jax.models.attention import pallas  # a sixth of a second that only TPUs should pay

        kernel = pallas.attention
    split = placement.per_device(kernel, (queries, keys, keys, ("rows", "length")), queries)
    return split(q, k, v, subtree_end)
