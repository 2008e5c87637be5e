"""Squared error of every labelled step's score."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cfprm_jax.losses.bce import step_weights


def mse(
    step_logits: Float[Array, "trajectories steps"],
    labels: Float[Array, "trajectories steps"],
    negative_weight: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over labelled steps of (sigmoid(z) - y)^2, and their number.

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
    # 1 - sigmoid(z) as sigmoid(-z): the residual of a hard label keeps its digits when sigmoid(z) rounds to 1.
    residual = (1.0 - y) * jax.nn.sigmoid(z) - y * jax.nn.sigmoid(-z)
    weight = step_weights(labels, negative_weight)
    return jnp.sum(weight * residual**2), jnp.sum(weight)
