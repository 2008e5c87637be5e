"""Float32 split into a bfloat16 number and its lower 16 bits, as --optimizer=adamw_compact stores a master."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOW_BITS = 16


def split_float32(x: Float[Array, "*shape"]) -> tuple[jax.Array, Int[Array, "*shape"]]:
    """x as (its bfloat16 rounding, int16 difference of their bits); join_float32 gives the same bits back."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Ties go away from zero: the difference is then within [-2^15, 2^15 - 1], where ties to even would need 2^15 too.
    high = (bits + jnp.uint32(1 << (LOW_BITS - 1))) >> LOW_BITS
    low = (bits & jnp.uint32(0xFFFF)).astype(jnp.uint16)
    return (
        jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16),
        jax.lax.bitcast_convert_type(low, jnp.int16),
    )


def join_float32(high: jax.Array, low: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 whose split is (high, low)."""
    upper = jax.lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << LOW_BITS
    lower = jax.lax.bitcast_convert_type(low.astype(jnp.int32), jnp.uint32)  # a negative one borrows from above
    return jax.lax.bitcast_convert_type(upper + lower, jnp.float32)
