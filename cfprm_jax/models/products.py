"""The product of activations with a weight matrix."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, BFloat16, Float

# XLA on CPU moves a transposition into the product that reads it, which then has no fast kernel; not past padding.
_PADDING = 16

_Kept = tuple[jax.Array | None, jax.Array | None]


def matmul_precision(dtype: Any) -> jax.lax.Precision | None:
    """Full precision for float32, which GPU and TPU would compute in TF32 or bfloat16 otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def times(x: Float[Array, "... into"], kernel: Float[Array, "out into"]) -> Float[Array, "... out"]:
    """x W^T in the dtype of x."""
    # One dimension for all tokens. The gradient of W sums over them, and for a sum over two dimensions XLA on CPU first
    # writes dy out transposed, fused with what dy is computed from: operands read down columns, at a stride that misses
    # every cache, were a third of a small model's step.
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    product = _times_bfloat16 if x.dtype == jnp.bfloat16 else functools.partial(_einsum, "ti,oi->to")
    y = product(flat, kernel.astype(x.dtype))
    return y.reshape(*x.shape[:-1], kernel.shape[0])


def times_columns(x: Float[Array, "into columns"], kernel: Float[Array, "out into"]) -> Float[Array, "out columns"]:
    """W x in the dtype of x."""
    product = _einsum if x.dtype != jnp.bfloat16 else _einsum_bfloat16
    return product("ir,oi->or", x, kernel.astype(x.dtype))


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=matmul_precision(a.dtype))


def _einsum_bfloat16(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    on_cpu, elsewhere = (functools.partial(product, subscripts) for product in (_einsum_float32, _einsum))
    return jax.lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


def _einsum_float32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The same by way of a float32 result.

    For such products XLA on CPU has fast kernels, with AMX where the processor has it; those with a bfloat16 result it
    computes in float32. Accelerators accumulate in float32 and round what they write.
    """
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


# The backward pass is written out because the derivative of a product with a float32 result is a product of a float32
# with a bfloat16 matrix, which has no fast kernel.
@jax.custom_vjp
def _times_bfloat16(
    x: BFloat16[Array, "tokens into"], kernel: BFloat16[Array, "out into"]
) -> BFloat16[Array, "tokens out"]:
    return _einsum_bfloat16("ti,oi->to", x, kernel)


def _forward(x: CustomVJPPrimal, kernel: CustomVJPPrimal) -> tuple[jax.Array, _Kept]:
    """An operand is kept for the gradient of the other one only: a frozen kernel needs no x."""
    kept = x.value if kernel.perturbed else None, kernel.value if x.perturbed else None
    return _times_bfloat16(x.value, kernel.value), kept


def _backward(kept: _Kept, grad: jax.Array | SymbolicZero) -> tuple[jax.Array | None, jax.Array | None]:
    if isinstance(grad, SymbolicZero):
        return None, None
    x, kernel = kept
    x_gradient = None if kernel is None else _einsum_bfloat16("to,oi->ti", grad, kernel)
    if x is None:
        return x_gradient, None
    return x_gradient, jax.lax.platform_dependent(
        grad, x, cpu=_kernel_gradient, default=functools.partial(_einsum, "to,ti->oi")
    )


def _kernel_gradient(
    grad: BFloat16[Array, "tokens out"], x: BFloat16[Array, "tokens into"]
) -> BFloat16[Array, "out into"]:
    rows = jnp.pad(grad.T, ((0, 0), (0, _PADDING)))
    return _einsum_float32("ot,ti->oi", rows, jnp.pad(x, ((0, _PADDING), (0, 0))))


_times_bfloat16.defvjp(_forward, _backward, symbolic_zeros=True)
