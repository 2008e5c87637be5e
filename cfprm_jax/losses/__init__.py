"""Losses of a process reward model on the raw head outputs.

Each takes the head outputs z of a batch and their labels, both [trajectories, steps], where a label is a number in
[0, 1] and NaN means "no label" (unlabelled or padding), and returns (total, count): two float32 scalars whose quotient
is the loss. Totals and counts of microbatches add up to those of the batch, so the caller divides by the count of the
*global* batch. The losses over a question's tree read several trajectories at once and so must see all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from cfprm_jax.config import LossConfig
from cfprm_jax.data.distinct import DistinctSteps
from cfprm_jax.losses.bce import bce
from cfprm_jax.losses.mse import mse
from cfprm_jax.losses.q_ranking import q_ranking, q_ranking_by_question
from cfprm_jax.losses.q_ranking_tree import q_ranking_tree

Labels = Float[Array, "trajectories steps"]
Sums = tuple[Float[Array, ""], Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a batch: what the flags choose, called with (step_logits, labels, distinct).

    Attributes:
      function: (step_logits, labels) -> (total, count).
      joint: it reads several trajectories at once, so that parts of a batch do not add up. function has the batch's
        DistinctSteps as a third argument.
      once: it is over distinct steps, with the labels of DistinctSteps.
      redundancy_weight: of the mean binary cross-entropy of the redundancy output, which is added; 0 without one.
    """

    function: Callable[..., Sums]
    joint: bool = False
    once: bool = False
    redundancy_weight: float = 0.0

    def labels(self, labels: Labels, distinct: DistinctSteps | None) -> Labels:
        """The labels that count: those of trajectories, or each once."""
        return self._need(distinct).labels if self.once else labels  # type: ignore[return-value]

    def __call__(self, step_logits: Labels, labels: Labels, distinct: DistinctSteps | None = None) -> Sums:
        """(total, count) of a batch, or of a part of it unless the loss is joint."""
        labels = self.labels(labels, distinct)
        return (
            self.function(step_logits, labels, self._need(distinct))
            if self.joint
            else self.function(step_logits, labels)
        )

    def _need(self, distinct: DistinctSteps | None) -> DistinctSteps:
        if distinct is None:
            raise ValueError("a loss over distinct steps or questions needs the DistinctSteps of the batch")
        return distinct


def loss_function(config: LossConfig) -> Loss:
    """The loss that --loss, --label_weight and their options name."""
    return dataclasses.replace(_step_loss(config), redundancy_weight=config.redundancy_weight)


def _step_loss(config: LossConfig) -> Loss:
    once = config.label_weight == "node"
    if config.loss != "q_ranking":
        plain = {"bce": bce, "mse": mse}[config.loss]
        return Loss(functools.partial(plain, negative_weight=config.negative_weight), once=once)
    margin = config.margin
    if config.label_weight == "trajectory":
        return Loss(functools.partial(q_ranking, margin=margin))
    if config.label_weight == "question":
        return Loss(lambda z, y, distinct: q_ranking_by_question(z, y, distinct.questions, margin), joint=True)

    def tree(z: Labels, y: Labels, distinct: Any) -> Sums:
        return q_ranking_tree(
            z, y, distinct.nodes, distinct.questions, margin=margin, negatives=config.ranking_negatives
        )

    return Loss(tree, joint=True, once=True)


__all__ = ["Loss", "bce", "loss_function", "mse", "q_ranking", "q_ranking_by_question", "q_ranking_tree"]
