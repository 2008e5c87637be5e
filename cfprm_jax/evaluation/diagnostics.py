"""What step scores go with, beside right and wrong: signs that a process reward model judges something else.

A model that has become an outcome reward model gives its lowest score at the last step more often than errors are
there (Zhang et al., "The Lessons of Developing Process Reward Models in Mathematical Reasoning", 2025: 17.5 % for
Qwen2.5-Math-PRM-7B, 42.2 % for Skywork-7B), and passes wrong processes that end in a right answer. One that judges by
the look of a step has scores that go with its length or position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from cfprm_jax.evaluation.statistics import spearman, spearman_within


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of step scores with a quantity of the step.

    Attributes:
      quantity: "characters" of the step's text, or its "position" in the solution.
      all_steps: over all steps together; None where the score or the quantity does not vary.
      within_solutions: mean of the solutions' own correlations, which the difficulty of questions has no part in.
      solutions: how many have a correlation of their own.
    """

    quantity: str
    all_steps: float | None
    within_solutions: float | None
    solutions: int


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """The diagnostics of some scored solutions.

    Attributes:
      solutions: with two scored steps or more; a single step is always the last and has no part in any of this.
      lowest_at_last: share of them whose lowest score (the first of equal ones) is at the last step; None without any.
      wrong_process: solutions that are known to reach the right answer by a wrong process, single steps included.
      wrong_process_accuracy: share of those that are judged rightly; None without any.
      correlations: of step scores with characters and position.
    """

    solutions: int
    lowest_at_last: float | None
    wrong_process: int
    wrong_process_accuracy: float | None
    correlations: tuple[Correlation, ...]


class Collector:
    """Takes the scores of solutions one by one."""

    def __init__(self) -> None:
        self._scores: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._wrong_process: list[bool] = []

    def add(self, scores: Float[np.ndarray, " steps"] | None, steps: Sequence[str] | None) -> None:
        """A solution.

        Args:
          scores: of its steps, or logits, which order them as well; None if it could not be scored.
          steps: their texts; None where they are not known, and then it has no part in the correlation with characters.
        """
        if scores is None or len(scores) < 2:
            return
        self._scores.append(np.asarray(scores, np.float64))
        lengths = [np.nan] * len(scores) if steps is None else [float(len(step)) for step in steps]
        if len(lengths) != len(scores):
            raise ValueError(f"{len(lengths)} texts and {len(scores)} scores")
        self._lengths.append(np.array(lengths))

    def add_wrong_process(self, judged_rightly: bool) -> None:
        """A solution that reaches the right answer by a wrong process."""
        self._wrong_process.append(judged_rightly)

    def result(self) -> Diagnostics:
        """The diagnostics of all of them."""
        at_last = [int(scores.argmin()) == len(scores) - 1 for scores in self._scores]
        sizes = [len(scores) for scores in self._scores]
        scores = np.concatenate([np.zeros(0), *self._scores])
        lengths = np.concatenate([np.zeros(0), *self._lengths])
        positions = np.concatenate([np.zeros(0), *(np.arange(size, dtype=np.float64) for size in sizes)])
        solution = np.repeat(np.arange(len(sizes)), sizes)
        known = np.isfinite(lengths)
        # Solutions are numbered anew, so that none is empty.
        _, numbered = np.unique(solution[known], return_inverse=True)
        return Diagnostics(
            solutions=len(sizes),
            lowest_at_last=_mean(at_last),
            wrong_process=len(self._wrong_process),
            wrong_process_accuracy=_mean(self._wrong_process),
            correlations=(
                _correlation("characters", scores[known], lengths[known], numbered),
                _correlation("position", scores, positions, solution),
            ),
        )


def _mean(values: Sequence[bool]) -> float | None:
    return float(np.mean(values)) if values else None


def _correlation(quantity: str, scores: np.ndarray, values: np.ndarray, solution: np.ndarray) -> Correlation:
    own = spearman_within(scores, values, solution)
    own = own[np.isfinite(own)]
    return Correlation(quantity, spearman(scores, values), float(own.mean()) if len(own) else None, len(own))
