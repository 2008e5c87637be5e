"""Metrics of --grid=real with intervals over records and seeds, paired between treatments.

Resample b draws records (of the pool questions, of ProcessBench solutions) with replacement. Every cell sees the same
draws, so that a difference of two treatments is that of the same records in each resample. Their variance over
resamples is the part of the error that records cause. Seeds are too few to be resampled: of three, a bootstrap sees
two thirds of their variance, and its quantiles end at the seeds' own values. Their part is the variance of their
values over their number, and the interval is Student's t of both parts, as in :mod:`.intervals`. With one seed it is
about records alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.evaluation.first_error import NO_ERROR
from cfprm_jax.evaluation.statistics import spearman
from cfprm_jax.experiments.intervals import LEVEL, crossed
from cfprm_jax.experiments.real_data import EvaluationSets, HeldOut
from cfprm_jax.run.evaluation import auroc

Arrays = Mapping[str, np.ndarray]
Weights = Float[np.ndarray, "resamples units"]
Table = Float[np.ndarray, "seeds 1+resamples"]
_SEED = 0


class Metric(NamedTuple):
    """A number of a cell, as a function of how often each unit counts.

    Attributes:
      name: in tables.
      unit: what is resampled: "record", "question" or the name of a subset of ProcessBench.
      units: how many of them there are.
      value: (arrays of a cell, weights) -> the metric of every resample.
    """

    name: str
    unit: str
    units: int
    value: Callable[[Arrays, Weights], Float[np.ndarray, " resamples"]]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A metric or a difference of two.

    Attributes:
      mean: over seeds, of all records.
      low, high: 95 % interval.
      p: two-sided p-value of "it is 0".
      by_seed: of each seed.
    """

    mean: float
    low: float
    high: float
    p: float
    by_seed: tuple[float, ...]

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0 on that side, else 0."""
        return int(self.low > 0) - int(self.high < 0)


def metrics(sets: EvaluationSets, sizes: Sequence[int], aggregation: str, subsets: str) -> list[Metric]:
    """The metrics that the sets allow.

    Args:
      sizes: the n of Best-of-N.
      aggregation: of a candidate's step scores.
      subsets: candidates of Best-of-N, see :data:`.cell.SUBSETS`.
    """
    found: list[Metric] = []
    held_out = sets.held_out
    if held_out is not None:
        record, records = held_out.record, int(held_out.item_record.max()) + 1
        positive, siblings = held_out.right, held_out.siblings

        def ranking(arrays: Arrays, weights: Weights) -> np.ndarray:
            z = arrays["held_out/logits"]
            known = np.isfinite(z)
            return weighted_auroc(z[known], positive[known], record[known], weights)

        def negatives(arrays: Arrays, weights: Weights) -> np.ndarray:
            return weighted_negative_f1(arrays["held_out/logits"], positive, record, weights)

        def between_siblings(arrays: Arrays, weights: Weights) -> np.ndarray:
            return weighted_pairs(arrays["held_out/logits"], siblings, record, weights)

        found.append(Metric("AUROC", "record", records, ranking))
        if len(siblings):
            found.append(Metric("sibling AUROC", "record", records, between_siblings))
        found.append(Metric("negative F1", "record", records, negatives))
        found.append(Metric("first error", "record", records, lambda a, w: weighted_mean(a["held_out/located"], w)))
    if sets.pool is not None:
        key = f"pool/{aggregation}/{subsets}"
        for place, n in enumerate(sizes):
            found.append(Metric(f"Best-of-{n}", "question", len(sets.pool.correct), _column(key, place)))
    for one in sets.process_bench:
        value = _process_f1(f"process_bench/{one.name}", one.label != NO_ERROR)
        found.append(Metric(f"ProcessBench {one.name} F1", one.name, len(one.label), value))
    return found


def _column(key: str, place: int) -> Callable[[Arrays, Weights], np.ndarray]:
    return lambda arrays, weights: weighted_mean(arrays[key][:, place], weights)


def _process_f1(key: str, wrong: Bool[np.ndarray, " units"]) -> Callable[[Arrays, Weights], np.ndarray]:
    return lambda arrays, weights: weighted_process_f1(arrays[key], wrong, weights)


def weighted_mean(values: Float[np.ndarray, " units"], weights: Weights) -> Float[np.ndarray, " resamples"]:
    """The mean of values with weights."""
    return weights @ values / weights.sum(axis=1)


def weighted_auroc(
    scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], unit: Int[np.ndarray, " n"], weights: Weights
) -> Float[np.ndarray, " resamples"]:
    """Probability that a positive scores above a negative, a tie counting one half; NaN without one of them."""
    if not len(scores):
        return np.full(len(weights), np.nan)
    order = np.argsort(scores, kind="stable")
    first = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) > 0)
    out = np.empty(len(weights))
    for place, row in enumerate(weights):
        own = row[unit[order]]
        above = np.add.reduceat(np.where(positive[order], own, 0.0), first)
        below = np.add.reduceat(np.where(positive[order], 0.0, own), first)
        total = above.sum() * below.sum()
        out[place] = np.sum(above * (np.cumsum(below) - below / 2)) / total if total else np.nan
    return out


def position_auroc(held_out: HeldOut) -> float:
    """AUROC of distinct steps by their index alone, the earlier of two scored higher: what a PRM has to exceed."""
    return auroc(-held_out.step.astype(float), held_out.right)


def position_correlation(held_out: HeldOut, arrays: Arrays) -> float | None:
    """Spearman's correlation of the logits of distinct steps with their index; None if either is constant."""
    z = arrays["held_out/logits"]
    known = np.isfinite(z)
    return spearman(z[known], held_out.step[known].astype(float))


def weighted_pairs(
    z: Float[np.ndarray, " n"], pairs: Int[np.ndarray, "pairs 2"], unit: Int[np.ndarray, " n"], weights: Weights
) -> Float[np.ndarray, " resamples"]:
    """Share of pairs whose first member has the higher z, a tie counting one half; NaN without a pair.

    A pair counts as often as the unit of its members, which have the same; one without z is left out.
    """
    first, second = z[pairs[:, 0]], z[pairs[:, 1]]
    known = np.isfinite(first) & np.isfinite(second)
    own = unit[pairs[known, 0]]
    won = (first > second)[known] + 0.5 * (first == second)[known]
    total = weights @ np.bincount(own, minlength=weights.shape[1])
    above = weights @ np.bincount(own, won, weights.shape[1])
    return np.divide(above, total, out=np.full(len(weights), np.nan), where=total > 0)


def weighted_negative_f1(
    z: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"], unit: Int[np.ndarray, " n"], weights: Weights
) -> Float[np.ndarray, " resamples"]:
    """F1 of the negative class at a score of 0.5, where a step without z is called right; NaN without a negative."""
    called = z <= 0  # NaN is not
    hit, alarm, missed = (
        np.bincount(unit, mask, weights.shape[1])
        for mask in (called & ~positive, called & positive, ~called & ~positive)
    )
    sums = 2 * (weights @ hit), weights @ alarm + weights @ missed
    total = sums[0] + sums[1]
    return np.divide(sums[0], total, out=np.full(len(weights), np.nan), where=total > 0)


def weighted_process_f1(
    right: Float[np.ndarray, " units"], wrong: Bool[np.ndarray, " units"], weights: Weights
) -> Float[np.ndarray, " resamples"]:
    """Harmonic mean of the accuracies on erroneous and on correct solutions; 0 where both are 0, NaN without one."""
    parts = []
    for kind in (wrong, ~wrong):
        total = weights @ kind.astype(np.float64)
        share = np.divide(weights @ (right * kind), total, out=np.full(len(weights), np.nan), where=total > 0)
        parts.append(share)
    both = parts[0] + parts[1]
    return np.where(both == 0, 0.0, 2 * parts[0] * parts[1] / np.where(both == 0, 1.0, both))


class Bootstrap:
    """The draws that all cells share."""

    def __init__(self, resamples: int) -> None:
        """Draws are made when they are first needed.

        Args:
          resamples: how many.
        """
        self._resamples = resamples
        self._units: dict[tuple[str, int], Weights] = {}

    def table(self, metric: Metric, arrays: Sequence[Arrays]) -> Table:
        """The metric of each seed: of all units, then of every resample of them."""
        weights = np.concatenate([np.ones((1, metric.units)), self._of_units(metric)])
        return np.stack([metric.value(one, weights) for one in arrays])

    def metric(self, metric: Metric, table: Table) -> Interval:
        """The mean over seeds with its interval, of which only what a metric can be, 0 to 1, is kept."""
        found = self.difference(metric, table)
        return dataclasses.replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0))

    def difference(self, metric: Metric, table: Table) -> Interval:
        """The mean over seeds of a difference of two tables, with its interval."""
        by_seed, resampled = table[:, 0], table[:, 1:].mean(axis=0)
        known = resampled[np.isfinite(resampled)]
        error = crossed(by_seed, float(known.var(ddof=1)) if len(known) > 1 else math.nan, metric.units)
        mean, half = float(by_seed.mean()), error.half(LEVEL)
        return Interval(mean, mean - half, mean + half, error.p_value(mean), tuple(by_seed.tolist()))

    def _of_units(self, metric: Metric) -> Weights:
        key = (metric.unit, metric.units)
        if key not in self._units:
            rng = np.random.default_rng([_SEED, metric.units])
            even = np.full(metric.units, 1 / metric.units)
            self._units[key] = rng.multinomial(metric.units, even, self._resamples).astype(np.float64)
        return self._units[key]
