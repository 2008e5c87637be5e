"""Q-value ranking on the tree of a question's solutions: every distinct step counts once.

Ranked trajectory by trajectory, the terms of a common prefix are repeated as often as solutions leave it, and a
solution that ends at its first mistake has at most one negative. Here the solutions of a question form one tree of
distinct steps (:mod:`cfprm_jax.data.distinct`), whose root is the question itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from cfprm_jax.losses.q_ranking import LOG_ZERO


def q_ranking_tree(
    step_logits: Float[Array, "trajectories steps"],
    labels: Float[Array, "trajectories steps"],
    nodes: Int[Array, "trajectories steps"],
    questions: Int[Array, " trajectories"],
    *,
    margin: float = 4.0,
    negatives: str = "path",
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the terms of all distinct positive steps and of one start term a question, and the number of terms.

    With P(t) the distinct positive steps on the path from the question to t, t included, and N a set of distinct
    negative steps, a positive step t and a question q with a negative step have the terms

    ``l_t = -log(e^z_t / (e^0 + sum over p in P(t) of e^z_p + sum over w in N(t) of e^(z_w + margin)))`` and
    ``l_q = -log(e^0 / (e^0 + sum over w in N(q) of e^(z_w + margin)))``.

    N(q) holds all negative steps of the question. With negatives="question" N(t) is N(q). With "path" it holds those
    that hang off the path to t: whose step before is on it, or which begin a solution. These are the wrong steps that
    could have been taken on the way to t and right after it.

    Every occurrence of a step has the same z, up to rounding; the first one is read.

    Args:
      step_logits: head outputs z, float32 or bfloat16; values and gradients are finite for |z| up to 1e4.
      labels, nodes, questions: as in :class:`~cfprm_jax.data.distinct.DistinctSteps`: labels are positive above 0.5,
        and NaN except at the first occurrence of a step.
      margin: how far (in z) negatives are pushed below positives.
      negatives: which ones a step is ranked against: "path" or "question".

    Returns:
      (total, count), float32 scalars. Without a label both are 0 and so is the gradient.
    """
    trajectories, steps = step_logits.shape
    z = step_logits.astype(jnp.float32).reshape(-1)
    y = labels.reshape(-1)
    positive, negative = y > 0.5, y <= 0.5  # NaN is neither
    pushed = z + margin
    of_question = _segment_logsumexp(pushed, negative, jnp.repeat(questions, steps), trajectories)

    on_path = jnp.where(positive, z, LOG_ZERO)[nodes]
    if negatives == "question":
        start = of_question[questions]
    else:
        # Children of a step stand in its own place, those of a question behind all steps.
        root = trajectories * steps + questions
        parents = jnp.concatenate([root[:, None], nodes[:, :-1]], axis=1).reshape(-1)
        children = _segment_logsumexp(pushed, negative, parents, trajectories * (steps + 1))
        start = children[root]
        on_path = jnp.logaddexp(on_path, children[nodes])
    start = jnp.logaddexp(0.0, start)
    running = jax.lax.cumlogsumexp(jnp.concatenate([start[:, None], on_path], axis=1), axis=1)[:, 1:]

    counted = jnp.zeros(trajectories, bool).at[jnp.repeat(questions, steps)].max(negative)
    total = jnp.sum(jnp.where(positive, running.reshape(-1) - z, 0.0))
    total += jnp.sum(jnp.where(counted, jnp.logaddexp(0.0, of_question), 0.0))
    return total, jnp.sum(positive, dtype=jnp.float32) + jnp.sum(counted, dtype=jnp.float32)


def _segment_logsumexp(
    values: Float[Array, " n"], included: Bool[Array, " n"], segments: Int[Array, " n"], number: int
) -> Float[Array, " number"]:
    """log of the sum of exp of the included values of each segment; LOG_ZERO for one without any."""
    values = jnp.where(included, values, LOG_ZERO)
    largest = jax.lax.stop_gradient(jnp.full(number, LOG_ZERO).at[segments].max(values))
    shifted = jnp.where(included, values - largest[segments], LOG_ZERO)
    sums = jnp.zeros(number).at[segments].add(jnp.exp(shifted))
    # Not log(0), whose gradient would be infinite where nothing is selected.
    return jnp.where(sums > 0, jnp.log(jnp.where(sums > 0, sums, 1.0)) + largest, LOG_ZERO)
