"""The product of activations with a weight matrix."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Full precision for float32, which GPU and TPU would compute in TF32 or bfloat16 otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def times(x: Float[Array, "... into"], kernel: Float[Array, "out into"]) -> Float[Array, "... out"]:
    """x W^T in the dtype of x."""
    # One dimension for all tokens. The gradient of W sums over them, and for a sum over two dimensions XLA on CPU first
    # writes dy out transposed, fused with what dy is computed from: operands read down columns, at a stride that misses
    # every cache, were a third of a small model's step.
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = jnp.einsum("ti,oi->to", flat, kernel.astype(x.dtype), precision=matmul_precision(x.dtype))
    return y.reshape(*x.shape[:-1], kernel.shape[0])


def times_columns(x: Float[Array, "into columns"], kernel: Float[Array, "out into"]) -> Float[Array, "out columns"]:
    """W x in the dtype of x."""
    return jnp.einsum("ir,oi->or", x, kernel.astype(x.dtype), precision=matmul_precision(x.dtype))
