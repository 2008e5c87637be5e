"""Q-value ranking: correct steps above wrong ones, later correct steps above earlier ones.

The comparative loss of PQM ("Process Reward Model with Q-value Rankings", Li and Li 2024), with a constant anchor
Q_0 = 0 at the start of every trajectory: it stands below every positive step and above every negative one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Stands for log 0. Far below any score is enough, and finite, so that no difference of two infinities ever arises.
LOG_ZERO = -1e30


def q_ranking(
    step_logits: Float[Array, "trajectories steps"],
    labels: Float[Array, "trajectories steps"],
    margin: float = 4.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over trajectories of their mean ranking loss, and the number of trajectories with a labelled step.

    With P the steps labelled above 0.5 and N the other labelled ones, a trajectory's value is
    ``(sum over t in P of l_t + [N not empty] l_0) / (|P| + [N not empty])`` where

    ``l_t = -log(e^z_t / (e^0 + sum over q in P, q <= t of e^z_q + sum over w in N of e^(z_w + margin)))`` and
    ``l_0 = -log(e^0 / (e^0 + sum over w in N of e^(z_w + margin)))``.

    All negatives count for every t, wherever they stand.

    Args:
      step_logits: head outputs z, float32 or bfloat16, not their sigmoids; values and gradients are finite for |z| up
        to 1e4.
      labels: y in [0, 1], positive above 0.5; NaN where there is none.
      margin: how far (in z) negatives are pushed below positives; PQM's zeta.

    Returns:
      (total, count), float32 scalars. Without a label both are 0 and so is the gradient.
    """
    values, counted = _by_trajectory(step_logits, labels, margin)
    return jnp.sum(values), jnp.sum(counted, dtype=jnp.float32)


def q_ranking_by_question(
    step_logits: Float[Array, "trajectories steps"],
    labels: Float[Array, "trajectories steps"],
    questions: Int[Array, " trajectories"],
    margin: float = 4.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over questions of the mean value of their trajectories in :func:`q_ranking`, and the number of questions.

    So the many trajectories of a record with alternatives at every step weigh as much as the one of a record without.
    Only trajectories with a labelled step are averaged, and only questions that have one are counted.

    Args:
      step_logits, labels, margin: as in :func:`q_ranking`.
      questions: the first trajectory with the same question (:class:`~cfprm_jax.data.distinct.DistinctSteps`).

    Returns:
      (total, count), float32 scalars. Without a label both are 0 and so is the gradient.
    """
    values, counted = _by_trajectory(step_logits, labels, margin)
    sums = jnp.zeros_like(values).at[questions].add(values)
    numbers = jnp.zeros_like(values).at[questions].add(counted.astype(jnp.float32))
    return jnp.sum(sums / jnp.maximum(numbers, 1)), jnp.sum(numbers > 0, dtype=jnp.float32)


def _by_trajectory(
    step_logits: Float[Array, "trajectories steps"], labels: Float[Array, "trajectories steps"], margin: float
) -> tuple[Float[Array, " trajectories"], Bool[Array, " trajectories"]]:
    """The value of every trajectory, and whether it has a labelled step."""
    z = step_logits.astype(jnp.float32)
    positive, negative = labels > 0.5, labels <= 0.5  # NaN is neither
    has_negative = negative.any(axis=1)

    anchor = jnp.zeros((z.shape[0], 1), jnp.float32)
    negatives = jnp.where(negative, z + margin, LOG_ZERO)
    anchor_and_negatives = jax.nn.logsumexp(jnp.concatenate([anchor, negatives], axis=1), axis=1)
    # The running sum starts with what every denominator holds, so each prefix is finite also before the first positive.
    positives = jnp.where(positive, z, LOG_ZERO)
    running = jax.lax.cumlogsumexp(jnp.concatenate([anchor_and_negatives[:, None], positives], axis=1), axis=1)[:, 1:]

    steps = jnp.sum(jnp.where(positive, running - z, 0.0), axis=1)
    start = jnp.where(has_negative, anchor_and_negatives, 0.0)
    terms = jnp.sum(positive, axis=1) + has_negative
    return (steps + start) / jnp.maximum(terms, 1), terms > 0
