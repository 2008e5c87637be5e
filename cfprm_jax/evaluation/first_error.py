"""Where the first error is, by a PRM's step scores: the task of ProcessBench (Zheng et al., 2024, arXiv 2412.06559).

The predicted error is the first step whose score is below a threshold, or -1 for none. Of solutions with an
error those count whose predicted step is the labelled one, and of correct solutions those that are predicted to have
none; F1 is the harmonic mean of these two accuracies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float

NO_ERROR = -1


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSolution:
    """A solution with scores and the truth.

    Attributes:
      step_scores: in [0, 1]; None for one that could not be scored, which is predicted wrong whatever its label.
      label: index of its first wrong step, or NO_ERROR.
    """

    step_scores: Float[np.ndarray, " steps"] | None
    label: int


@dataclasses.dataclass(frozen=True)
class Accuracies:
    """How well errors are found in a set of solutions.

    Attributes:
      erroneous: solutions with an error.
      correct: solutions without one.
      unscored: of all of them, those without scores.
      accuracy_erroneous: share of the erroneous whose first error is found exactly; None if there are none.
      accuracy_correct: share of the correct in which none is found; None if there are none.
      f1: harmonic mean of the two; None if one is None, 0 if both are 0.
    """

    erroneous: int
    correct: int
    unscored: int
    accuracy_erroneous: float | None
    accuracy_correct: float | None
    f1: float | None


def predict(step_scores: Float[np.ndarray, " steps"] | None, threshold: float) -> int | None:
    """The first step whose score is below the threshold, or NO_ERROR; None without scores."""
    if step_scores is None:
        return None
    below = np.flatnonzero(np.asarray(step_scores) < threshold)
    return int(below[0]) if len(below) else NO_ERROR


def accuracies(solutions: Iterable[LabelledSolution], threshold: float) -> Accuracies:
    """Both accuracies and F1 at a threshold."""
    hits: dict[bool, list[bool]] = {False: [], True: []}
    unscored = 0
    for solution in solutions:
        unscored += solution.step_scores is None
        hits[solution.label == NO_ERROR].append(predict(solution.step_scores, threshold) == solution.label)
    erroneous, correct = (float(np.mean(hits[kind])) if hits[kind] else None for kind in (False, True))
    return Accuracies(
        len(hits[False]), len(hits[True]), unscored, erroneous, correct, harmonic_mean(erroneous, correct)
    )


def harmonic_mean(one: float | None, other: float | None) -> float | None:
    """2ab / (a + b); 0 where both are 0, None where one is missing."""
    if one is None or other is None:
        return None
    return 2 * one * other / (one + other) if one + other else 0.0


def tune(solutions: Sequence[LabelledSolution]) -> float:
    """The threshold with the highest F1: the middle of the best interval, of several equal ones that nearest to 0.5.

    A solution with its first error at step e is predicted right by thresholds above the score of e and not above the
    scores before it; a correct one by thresholds not above its lowest score. So F1 changes at scores only, and every
    threshold between two neighbouring ones is tried.
    """
    scores = [solution.step_scores for solution in solutions if solution.step_scores is not None]
    values = np.unique(np.concatenate([*scores, np.array([0.0, 1.0])]))
    # Above the highest score everything is an error, at the lowest nothing is.
    tried = np.concatenate([values[:1], (values[:-1] + values[1:]) / 2, values[-1:]])
    found = {False: np.zeros(len(tried)), True: np.zeros(len(tried))}
    count = {False: 0, True: 0}
    for solution in solutions:
        fine = solution.label == NO_ERROR
        count[fine] += 1
        if solution.step_scores is None:
            continue
        before = solution.step_scores if fine else solution.step_scores[: solution.label]
        right = tried <= (before.min() if len(before) else np.inf)
        if not fine:
            right &= tried > solution.step_scores[solution.label]
        found[fine] += right
    erroneous, correct = (found[kind] / max(count[kind], 1) for kind in (False, True))
    total = erroneous + correct
    f1 = np.divide(2 * erroneous * correct, total, out=np.zeros(len(tried)), where=total > 0)
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    return float(tried[best[np.abs(tried[best] - 0.5).argmin()]])
