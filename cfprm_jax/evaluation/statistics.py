"""How sure an accuracy is, and a difference of two: bootstraps over questions. And rank correlation.

Questions are the independent draws here (the candidates of one question are not), so they are what is resampled. All
systems that are evaluated together see the same resamples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.stats
from jaxtyping import Float

_CHUNK = 1024


def bootstrap_interval(
    outcomes: Float[np.ndarray, "questions systems"], resamples: int, seed: int, level: float = 0.95
) -> Float[np.ndarray, "systems 2"]:
    """The percentile interval of each system's mean over questions.

    Args:
      outcomes: what each question contributes to each mean: 0 or 1, or a mean over draws.
      resamples: how many times as many questions are drawn with replacement.
      seed: of the resampling.
      level: probability that the interval is meant to cover.

    Returns:
      low and high for each system.
    """
    tail = (1 - level) / 2
    return np.quantile(np.concatenate(list(_means(outcomes, resamples, seed))), (tail, 1 - tail), axis=0).T


def paired_p_value(
    differences: Float[np.ndarray, "questions systems"], resamples: int, seed: int
) -> Float[np.ndarray, " systems"]:
    """Two-sided p-value of "the mean difference is 0" from a paired bootstrap over questions.

    It is the level at which the percentile interval of the difference begins to hold 0: twice the share of resamples
    whose mean difference is on the other side of 0 or at 0, where the sample itself counts as one of them, so that it
    is never 0.

    Args:
      differences: what each question contributes to the difference of two systems.
    """
    below = above = np.zeros(differences.shape[1])
    for means in _means(differences, resamples, seed):
        # Sums of thirds and the like that cancel are 0 but for rounding.
        below, above = below + (means <= 1e-12).sum(axis=0), above + (means >= -1e-12).sum(axis=0)
    return np.minimum(1.0, 2 * (np.minimum(below, above) + 1) / (resamples + 1))


def _means(
    outcomes: Float[np.ndarray, "questions systems"], resamples: int, seed: int
) -> Iterator[Float[np.ndarray, "chunk systems"]]:
    """The mean over each resample of the questions."""
    questions = len(outcomes)
    rng = np.random.default_rng(seed)
    even = np.full(questions, 1 / questions)
    for done in range(0, resamples, _CHUNK):
        # How often each question is drawn is all that a mean needs, which makes resampling a matrix product.
        yield rng.multinomial(questions, even, min(_CHUNK, resamples - done)) @ outcomes / questions


def spearman(one: Float[np.ndarray, " n"], other: Float[np.ndarray, " n"]) -> float | None:
    """Spearman's rank correlation, equal values having their mean rank; None where one of them does not vary."""
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(scipy.stats.spearmanr(one, other).statistic)
