"""Binary cross-entropy of every labelled step, from logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def bce(
    step_scores: Float[Array, "trajectories steps"], labels: Float[Array, "trajectories steps"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over labelled steps of -[y log sigmoid(z) + (1 - y) log(1 - sigmoid(z))], and their number.

    Args:
      step_scores: head outputs z, float32 or bfloat16.
      labels: y in [0, 1], soft labels as they are; NaN where there is none.

    Returns:
      (total, count), float32 scalars. Without a label both are 0 and so is the gradient.
    """
    labelled = ~jnp.isnan(labels)
    # Masked before the arithmetic: a NaN that is discarded only afterwards still poisons the gradient.
    y = jnp.where(labelled, labels, 0.0).astype(jnp.float32)
    z = jnp.where(labelled, step_scores, 0.0).astype(jnp.float32)
    # softplus(-z) = -log sigmoid(z). Two terms of one sign: nothing cancels at large |z|.
    each = y * jax.nn.softplus(-z) + (1.0 - y) * jax.nn.softplus(z)
    return jnp.sum(jnp.where(labelled, each, 0.0)), jnp.sum(labelled, dtype=jnp.float32)
