"""How sure an accuracy is, and a difference of two: bootstraps over questions. And rank correlation.

Questions are the independent draws here (the candidates of one question are not), so they are what is resampled. All
systems that are evaluated together see the same resamples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

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
    return np.quantile(np.concatenate(list(resampled_means(outcomes, resamples, seed))), (tail, 1 - tail), axis=0).T


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
    return two_sided_p_value(np.concatenate(list(resampled_means(differences, resamples, seed))))


def two_sided_p_value(differences: Float[np.ndarray, "resamples systems"]) -> Float[np.ndarray, " systems"]:
    """The p-value of :func:`paired_p_value` from differences that are resampled already; NaN ones are left out."""
    # Sums of thirds and the like that cancel are 0 but for rounding.
    below, above = (differences <= 1e-12).sum(axis=0), (differences >= -1e-12).sum(axis=0)
    count = np.isfinite(differences).sum(axis=0)
    return np.minimum(1.0, 2 * (np.minimum(below, above) + 1) / (count + 1))


def resampled_means(
    outcomes: Float[np.ndarray, "questions systems"], resamples: int, seed: int
) -> Iterator[Float[np.ndarray, "chunk systems"]]:
    """The mean over each resample of the questions, in chunks of resamples; equal seeds draw equal questions."""
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
    import scipy.stats  # here, as it takes a second that every command would spend

    return float(scipy.stats.spearmanr(one, other).statistic)


def spearman_within(
    one: Float[np.ndarray, " n"], other: Float[np.ndarray, " n"], group: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " groups"]:
    """:func:`spearman` within each group, NaN where that has none.

    Args:
      group: the group of each pair, from 0; all of a group stand together, in ascending order.
    """
    sizes = np.bincount(group)

    def centred(values: np.ndarray) -> np.ndarray:
        order = np.lexsort((values, group))
        ordered, of = values[order], group[order]
        first = np.concatenate([[True], (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1])])
        run = np.cumsum(first) - 1
        # Equal values have the mean of the ranks that they take up.
        rank = np.empty(len(values))
        rank[order] = (np.bincount(run, np.arange(len(values))) / np.bincount(run))[run]
        return rank - (np.bincount(group, rank) / np.maximum(sizes, 1))[group]

    if not len(one):
        return np.zeros(0)
    a, b = centred(np.asarray(one)), centred(np.asarray(other))
    covariance, variances = np.bincount(group, a * b), np.bincount(group, a * a) * np.bincount(group, b * b)
    return np.divide(covariance, np.sqrt(variances), out=np.full(len(sizes), np.nan), where=variances > 0)
