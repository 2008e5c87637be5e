"""Binary cross-entropy of every labelled step, from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def bce(
    step_logits: Float[Array, "trajectories steps"],
    labels: Float[Array, "trajectories steps"],
    negative_weight: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over labelled steps of -[y log sigmoid(z) + (1 - y) log(1 - sigmoid(z))], and their number.

    With a negative_weight other than 1 both are sums of weights: of 1 for labels above 0.5, of it for the others.

    Args:
      step_logits: head outputs z, float32 or bfloat16; not their sigmoids.
      labels: y in [0, 1], soft labels as they are; NaN where there is none.
      negative_weight: weight of steps labelled 0.5 or less.

    Returns:
      (total, count), float32 scalars. Without a label both are 0 and so is the gradient.
    """
    labelled = ~jnp.isnan(labels)
    # Masked before the arithmetic: a NaN that is discarded only afterwards still poisons the gradient.
    y = jnp.where(labelled, labels, 0.0).astype(jnp.float32)
    z = jnp.where(labelled, step_logits, 0.0).astype(jnp.float32)
    # softplus(-z) = -log sigmoid(z). Two terms of one sign: nothing cancels at large |z|.
    each = y * jax.nn.softplus(-z) + (1.0 - y) * jax.nn.softplus(z)
    weight = step_weights(labels, negative_weight)
    return jnp.sum(weight * each), jnp.sum(weight)


def step_weights(
    labels: Float[Array, "trajectories steps"], negative_weight: float
) -> Float[Array, "trajectories steps"]:
    """Weight of every step in a mean over labelled steps: 1, negative_weight for a label up to 0.5, 0 without one."""
    weight = jnp.where(labels > 0.5, 1.0, negative_weight)
    return jnp.where(jnp.isnan(labels), 0.0, weight).astype(jnp.float32)
