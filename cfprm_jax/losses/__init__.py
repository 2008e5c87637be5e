"""Losses of a process reward model on the raw head outputs.

Each takes the head outputs z of a batch and their labels, both [trajectories, steps], where a label is a number in
[0, 1] and NaN means "no label" (unlabelled or padding), and returns (total, count): two float32 scalars whose quotient
is the loss. Both are plain sums over trajectories, so totals and counts of parts of a batch add up to those of the
whole: the division by the count of the *global* batch is left to the caller, who alone knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxtyping import Array, Float

from cfprm_jax.config import LossConfig
from cfprm_jax.losses.bce import bce
from cfprm_jax.losses.mse import mse
from cfprm_jax.losses.q_ranking import q_ranking

Loss = Callable[
    [Float[Array, "trajectories steps"], Float[Array, "trajectories steps"]],
    tuple[Float[Array, ""], Float[Array, ""]],
]


def loss_function(config: LossConfig) -> Loss:
    """The loss that --loss names, with its margin where it has one."""
    by_name: dict[str, Loss] = {
        "bce": bce,
        "mse": mse,
        "q_ranking": functools.partial(q_ranking, margin=config.margin),
    }
    return by_name[config.loss]


__all__ = ["Loss", "bce", "loss_function", "mse", "q_ranking"]
