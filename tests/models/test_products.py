"""Products with weights against float64 NumPy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.models.products import times, times_columns

ROUNDINGS = {"float32": 1e-6, "bfloat16": 2.0**-8}
SHAPES = ((2, 31, 48, 80), (1, 128, 80, 48), (3, 1, 16, 16))


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def assert_rounded(got: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Equal up to one rounding to the dtype, of sums whose terms are of order one."""
    assert got.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, rtol=ROUNDINGS[dtype], atol=1e-6 * np.abs(expected).max()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_once(dtype, shape):
    rows, length, into, out = shape
    rng = np.random.default_rng(0)
    x, kernel = normal(rng, dtype, rows, length, into), normal(rng, "float32", out, into)
    grad = normal(rng, dtype, rows, length, out)
    y, (by_x, by_kernel) = jax.jit(lambda x, k, g: (times(x, k), jax.vjp(times, x, k)[1](g)))(x, kernel, grad)

    wide_x, wide_grad = (np.asarray(a, np.float64) for a in (x, grad))
    wide_kernel = np.asarray(kernel.astype(dtype), np.float64)
    assert_rounded(y, wide_x @ wide_kernel.T, dtype)
    assert_rounded(by_x, wide_grad @ wide_kernel, dtype)
    expected = np.einsum("rlo,rli->oi", wide_grad, wide_x)
    assert by_kernel.dtype == jnp.float32, "that of the weights"
    assert_rounded(by_kernel.astype(dtype), expected, dtype)

    columns = jax.jit(times_columns)(x[0].T, kernel)
    assert_rounded(columns, wide_kernel @ wide_x[0].T, dtype)


def test_what_xla_has_fast_kernels_for_on_cpu():
    """bfloat16 operands, a float32 result, and no transposed left side, forward and backward."""
    rows, length, into, out = SHAPES[0]
    rng = np.random.default_rng(0)
    x, kernel = normal(rng, "bfloat16", rows, length, into), normal(rng, "bfloat16", out, into)
    grad = normal(rng, "bfloat16", rows, length, out)
    both = jax.jit(lambda x, k, g: (times(x, k), jax.vjp(times, x, k)[1](g)))
    lowered = both.lower(x, kernel, grad)
    types = re.findall(r"dot_general.*\(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\) -> tensor<\w+x(\w+)>", lowered.as_text())
    assert types == [("bf16", "bf16", "f32")] * 3
    contracted = re.findall(r" dot\(.*lhs_contracting_dims=\{(\d)\}", lowered.compile().as_text())
    assert contracted == ["1"] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_operand_is_kept_for_the_gradient_of_the_other_alone(dtype):
    """A frozen kernel needs no x, and the first product of a network no kernel."""
    x, kernel = jnp.zeros((1, 128, 80), dtype), jnp.zeros((48, 80), dtype)

    def kept(function, argument):
        return sum(a.size for a in jax.tree.leaves(jax.vjp(function, argument)[1]))

    assert kept(lambda x: times(x, kernel), x) == kernel.size
    assert kept(lambda k: times(x, k), kernel) == x.size
