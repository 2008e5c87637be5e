"""Best-of-N: choose one of n candidates of every question, by a PRM's step scores or by vote, and count right choices.

The candidate whose aggregated score (see pool) is highest is chosen, the first in file order on a tie. Beside it: the
weighted vote (the answer whose candidates' aggregated scores add up to most), the majority vote, pass@1 (the mean over
the whole pool), the first candidate, and the oracle (whether any of the n is right). A vote's answer is right iff the
first of its candidates is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.pool import Pool
from cfprm_jax.evaluation.statistics import bootstrap_interval
from cfprm_jax.runtime.progress import counted

Key = tuple[int, str, str | None]
"""What has an accuracy: n, method, aggregation."""

METHODS = ("best_of_n", "weighted_vote", "majority", "pass_at_1", "first", "oracle")


@dataclasses.dataclass(frozen=True)
class AccuracyRow:
    """One accuracy, as a row of results.json.

    Attributes:
      n: number of candidates that are chosen from.
      method: one of METHODS.
      aggregation: of the step scores; None where there is none.
      accuracy: share of questions answered right, 0 to 1; with draws its mean over them.
      ci95: 95 % interval from a bootstrap over questions.
      draws: random subsets of n candidates; 0 is the first n in file order, or a method that draws none.
      draw_std: standard deviation of the accuracy over draws; None without draws.
    """

    n: int
    method: str
    aggregation: str | None
    accuracy: float
    ci95: tuple[float, float]
    draws: int
    draw_std: float | None


def _pick(values: np.ndarray, subset: Int[np.ndarray, "questions n"]) -> np.ndarray:
    return np.take_along_axis(values, subset, axis=1)


def _best(rank: Float[np.ndarray, "questions n"], correct: Bool[np.ndarray, "questions n"]) -> np.ndarray:
    """Whether the highest candidate, the first on a tie, is right."""
    return np.take_along_axis(correct, rank.argmax(axis=1)[:, None], axis=1)[:, 0]


def _vote(
    weight: Float[np.ndarray, "questions n"],
    group: Int[np.ndarray, "questions n"],
    correct: Bool[np.ndarray, "questions n"],
) -> np.ndarray:
    """Whether the answer with most weight, the one given first on a tie, is right; never without any answer."""
    questions, answers = len(group), int(group.max(initial=0)) + 1
    cell = np.arange(questions)[:, None] * answers + np.maximum(group, 0)
    answered = group >= 0
    totals = np.bincount(cell[answered], weight[answered], minlength=questions * answers)
    # Every candidate carries its answer's total, so that the first of the highest also settles ties.
    rank = np.where(answered, totals[cell], -1.0)
    return _best(rank, correct & answered)


def subsets(
    sizes: Int[np.ndarray, " questions"], n: Sequence[int], draws: int, seed: int
) -> Iterator[dict[int, np.ndarray]]:
    """The candidates to choose from: for each draw, for each n, int [questions, n] in file order.

    Args:
      sizes: number of candidates of each question.
      n: none larger than the smallest of sizes.
      draws: number of random subsets, of which that of a smaller n lies within that of a larger one; 0 gives the first
        n, once.
      seed: of the draws.
    """
    width = int(sizes.max())
    order = np.tile(np.arange(width), (len(sizes), 1))
    if not draws:
        yield {size: order[:, :size] for size in n}
        return
    rng = np.random.default_rng(seed)
    absent = order >= sizes[:, None]
    for _ in range(draws):
        shuffled = np.argsort(np.where(absent, 2.0, rng.random(order.shape)), axis=1)
        yield {size: np.sort(shuffled[:, :size], axis=1) for size in n}


def check_sizes(pool: Pool, n: Sequence[int]) -> None:
    """UserError if a question has fewer candidates than the largest n."""
    smallest = int(pool.sizes.argmin())
    if max(n) > pool.sizes[smallest]:
        raise UserError(
            f"--n={max(n)}: question {pool.ids[smallest]!r} has only "
            f"{counted(int(pool.sizes[smallest]), 'candidate')}, and every question needs as many as the largest n"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Outcomes:
    """What every question contributes to every accuracy.

    Attributes:
      keys: n, method and aggregation of each column.
      values: 0 or 1, or with draws the share of them in which the question is answered right.
      draw_means: with draws, the accuracy of each draw over each group of questions; NaN for methods without draws.
      draws: random subsets; 0 is the first n.
    """

    keys: tuple[Key, ...]
    values: Float[np.ndarray, "questions keys"]
    draw_means: Float[np.ndarray, "draws groups keys"] | None
    draws: int


def outcomes(
    pool: Pool, n: Sequence[int], draws: int, seed: int, groups: Bool[np.ndarray, "groups questions"]
) -> Outcomes:
    """Every method at every n. pass_at_1 and first do not depend on n, and stand at every n for comparison.

    Args:
      draws: number of random subsets of n candidates; 0 takes the first n.
      seed: of the draws.
      groups: mask of the questions of each group, for the standard deviation over draws.

    Raises:
      UserError: n is larger than the smallest number of candidates.
    """
    check_sizes(pool, n)
    keys = _keys(n, tuple(pool.ranks))
    fixed = {
        "pass_at_1": pool.correct.sum(axis=1) / pool.sizes,
        "first": pool.correct[:, 0].astype(np.float64),
    }
    total = np.zeros((len(pool.ids), len(keys)))
    shares = groups / groups.sum(axis=1, keepdims=True)
    means = np.full((draws, len(groups), len(keys)), np.nan) if draws else None
    for number, subset_of in enumerate(subsets(pool.sizes, n, draws, seed)):
        drawn = {size: _drawn(pool, subset) for size, subset in subset_of.items()}
        for column, (size, method, aggregation) in enumerate(keys):
            if method not in fixed:
                values = drawn[size][method, aggregation]
                total[:, column] += values
                if means is not None:
                    means[number, :, column] = shares @ values
    values = total / max(draws, 1)
    for column, (_, method, _) in enumerate(keys):
        if method in fixed:
            values[:, column] = fixed[method]
    return Outcomes(keys, values, means, draws)


def _keys(n: Sequence[int], aggregations: Sequence[str]) -> tuple[Key, ...]:
    scored = ("best_of_n", "weighted_vote")
    return tuple(
        (size, method, aggregation)
        for size in n
        for method in METHODS
        for aggregation in (aggregations if method in scored else (None,))
    )


def _drawn(pool: Pool, subset: Int[np.ndarray, "questions n"]) -> dict[tuple[str, str | None], np.ndarray]:
    """Which questions are answered right by every method that chooses from a subset of their candidates."""
    correct, group = _pick(pool.correct, subset), _pick(pool.group, subset)
    out: dict[tuple[str, str | None], np.ndarray] = {
        ("majority", None): _vote(np.ones(subset.shape), group, correct),
        ("oracle", None): np.asarray(correct.any(axis=1)),
    }
    for name in pool.ranks:
        out["best_of_n", name] = _best(_pick(pool.ranks[name], subset), correct)
        out["weighted_vote", name] = _vote(_pick(pool.weights[name], subset), group, correct)
    return out


def rows(
    found: Outcomes, groups: Bool[np.ndarray, "groups questions"], number: int, resamples: int, seed: int
) -> list[AccuracyRow]:
    """The accuracies over the questions of one group, with their intervals.

    Args:
      groups: the groups that were passed to :func:`outcomes`.
      number: the group.
      resamples, seed: of the bootstrap.
    """
    values = found.values[groups[number]]
    intervals = bootstrap_interval(values, resamples, seed)
    spread = None if found.draw_means is None else found.draw_means[:, number].std(axis=0)
    out = []
    for column, (size, method, aggregation) in enumerate(found.keys):
        drew = spread is not None and method not in ("pass_at_1", "first")
        out.append(
            AccuracyRow(
                n=size,
                method=method,
                aggregation=aggregation,
                accuracy=float(values[:, column].mean()),
                ci95=(float(intervals[column, 0]), float(intervals[column, 1])),
                draws=found.draws if drew else 0,
                draw_std=float(spread[column]) if drew and spread is not None else None,
            )
        )
    return out


def chosen(pool: Pool, aggregation: str, n: int) -> Int[np.ndarray, " questions"]:
    """The candidate of each question that is chosen from the first n."""
    return pool.ranks[aggregation][:, :n].argmax(axis=1)


def majority(pool: Pool, n: int) -> Int[np.ndarray, " questions"]:
    """The first candidate of each question that gives the answer given most often among the first n; -1 if none has."""
    group = pool.group[:, :n]
    counts = (group[:, :, None] == group[:, None, :]).sum(axis=2) * (group >= 0)
    return np.where(counts.any(axis=1), counts.argmax(axis=1), -1)
