"""F1 of right and of wrong steps, and the threshold that gives the best mean of the two.

Counts are in the last axis: TP right steps called right, FP wrong ones called right, TN wrong ones called wrong, FN
right ones called wrong. The mean of both F1 is PRMBench's PRMScore and ReasonEval's macro-F1. As in PRMBench's own
program a ratio of 0 to 0 is -1, and so is the F1 of a precision and a recall that are both 0: there it is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

UNDEFINED = -1.0
"""The F1 of what has none."""


class F1(NamedTuple):
    """Precision, recall and F1 of right steps, and of wrong ones ("negative")."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    negative_precision: np.ndarray
    negative_recall: np.ndarray
    negative_f1: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """PRMScore, or macro-F1; of no meaning where it is not defined."""
        return self.f1 * 0.5 + self.negative_f1 * 0.5

    @property
    def floored(self) -> F1:
        """The same with an F1 of 0 where it is undefined: nothing was found."""
        return self._replace(f1=np.maximum(self.f1, 0.0), negative_f1=np.maximum(self.negative_f1, 0.0))

    @property
    def defined(self) -> np.ndarray:
        """Whether both F1 are."""
        return (self.f1 != UNDEFINED) & (self.negative_f1 != UNDEFINED)


def f1(counts: Float[np.ndarray, "*shape 4"]) -> F1:
    """All of them, of counts (or means of counts)."""
    tp, fp, tn, fn = (np.asarray(counts, np.float64)[..., place] for place in range(4))
    precision, recall = _ratio(tp, tp + fp), _ratio(tp, tp + fn)
    negative_precision, negative_recall = _ratio(tn, tn + fn), _ratio(tn, tn + fp)
    return F1(
        precision,
        recall,
        # In this order of operations the last digit is that of PRMBench's program.
        _ratio(2 * precision * recall, precision + recall),
        negative_precision,
        negative_recall,
        _ratio(2 * negative_precision * negative_recall, negative_precision + negative_recall),
    )


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    safe = np.where(denominator == 0, 1.0, denominator)
    return np.where(denominator == 0, UNDEFINED, numerator / safe)


def count(
    valid: Bool[np.ndarray, " steps"],
    wrong: Bool[np.ndarray, " steps"],
    case: Int[np.ndarray, " steps"],
    cases: int,
) -> Float[np.ndarray, "cases 4"]:
    """TP, FP, TN and FN of each case.

    Args:
      valid: steps that are called right.
      wrong: steps that are wrong.
      case: index of the case of each step, below cases.
    """
    kinds = (valid & ~wrong, valid & wrong, ~valid & wrong, ~valid & ~wrong)
    return np.stack([np.bincount(case, kind, minlength=cases) for kind in kinds], axis=-1)


def best_threshold(
    signal: Float[np.ndarray, " steps"], wrong: Bool[np.ndarray, " steps"], near: float
) -> tuple[float, float]:
    """The threshold above which a signal means right, and the mean F1 there, the highest that there is.

    Thresholds lie in the middle between neighbouring values, below all or above all of them; of several equally good
    ones it is that nearest to `near`. Without steps of both kinds no threshold is better than `near` itself.
    """
    if not wrong.any() or wrong.all():
        return near, UNDEFINED
    order = np.argsort(signal, kind="stable")
    values, first = np.unique(signal[order], return_index=True)
    # Number of steps predicted wrong by each threshold (called), and of those that are wrong (tn).
    called = np.append(first, len(signal))
    tn = np.concatenate([[0], np.cumsum(wrong[order])])[called]
    fn, fp = called - tn, wrong.sum() - tn
    found = f1(np.stack([len(signal) - called - fp, fp, tn, fn], axis=-1))
    score = np.where(found.defined, found.mean, UNDEFINED)
    tried = np.concatenate([[values[0] - 1], (values[:-1] + values[1:]) / 2, [values[-1] + 1]])
    best = np.flatnonzero(score >= score.max() - 1e-12)
    chosen = best[np.abs(tried[best] - near).argmin()]
    return float(tried[chosen]), float(score[chosen])


def cross_fitted(
    signals: Sequence[Float[np.ndarray, " steps"]],
    wrong: Bool[np.ndarray, " steps"],
    half: Bool[np.ndarray, " steps"],
    near: float,
) -> Bool[np.ndarray, " steps"]:
    """Which steps are called right in each half by the threshold, and of several the signal, best in the other half.

    Args:
      signals: high where a step is right; several are tried in the order given.
      half: which half each step belongs to.
      near: see :func:`best_threshold`.
    """
    valid = np.zeros(len(wrong), bool)
    for here in (False, True):
        there = half != here
        fits = [best_threshold(signal[there], wrong[there], near) for signal in signals]
        best = max(range(len(fits)), key=lambda place: fits[place][1])
        own = half == here
        valid[own] = signals[best][own] > fits[best][0]
    return valid
