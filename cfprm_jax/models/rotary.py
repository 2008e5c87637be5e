"""Rotary position embedding: RoFormer, https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from cfprm_jax.models.config import BackboneConfig


def rotary_frequencies(net: BackboneConfig) -> np.ndarray:
    """Radians a position, float32 [head_dim / 2]: theta^(-2i / head_dim), scaled if the backbone has a scaling.

    Computed on the host, and rounded to float32 where the torch implementation rounds: at position 32,768 the last bit
    of a frequency is 0.002 radians, and the power function of an accelerator is not exact to that bit.
    """
    exponents = np.arange(0, net.head_dim, 2, dtype=np.float32) / np.float32(net.head_dim)
    powers = np.power(np.float64(net.rope_theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    return frequencies if net.rope_scaling is None else net.rope_scaling(frequencies)


def rotary_angles(
    positions: Int[Array, "rows length"], net: BackboneConfig
) -> tuple[Float[Array, "rows length half"], Float[Array, "rows length half"]]:
    """Cosine and sine of each position's angles, float32 (bfloat16 cannot represent all positions above 256)."""
    angles = positions.astype(jnp.float32)[..., None] * rotary_frequencies(net)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "rows length heads head_dim"],
    cosine: Float[Array, "rows length half"],
    sine: Float[Array, "rows length half"],
) -> Float[Array, "rows length heads head_dim"]:
    """Rotary embedding of the pairs (x[i], x[i + head_dim / 2]), in float32, returned in the dtype of x.

    In the half-split layout of Hugging Face's weights.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)
