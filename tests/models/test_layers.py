"""Layers against float64 NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from cfprm_jax.models.layers import RMSNorm

EPS = 1e-6


@pytest.mark.parametrize("shape", [(3, 20, 16), (20, 40, 16), (6, 20, 40, 16), (2, 45, 4, 8)])
def test_gradients_of_the_norm(shape: tuple[int, ...]) -> None:
    """Of the residual stream, and of heads."""
    rng = np.random.default_rng(0)
    x, grad = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal(shape[-1]).astype(np.float32)

    def norm(x, scale):
        return RMSNorm({"scale": scale}, EPS)(x)

    by_x, by_scale = jax.jit(lambda x, scale, grad: jax.vjp(norm, x, scale)[1](grad))(x, scale, grad)
    wide, pull = x.astype(np.float64), grad.astype(np.float64) * scale
    inverse = 1 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + EPS)
    expected = inverse * pull - wide * inverse**3 * np.mean(pull * wide, axis=-1, keepdims=True)
    np.testing.assert_allclose(by_x, expected, rtol=1e-5, atol=1e-5)
    summed = (grad * wide * inverse).reshape(-1, shape[-1]).sum(axis=0)
    np.testing.assert_allclose(by_scale, summed, rtol=1e-5, atol=1e-4)
