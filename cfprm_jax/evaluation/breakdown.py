"""The same accuracies over parts of the questions, the difference of two systems, and what scores go with.

Parts are data sets where there are several, the values of the rows' own fields (level, subject, perturbation_type), and
the questions with and without those whose reference answer is "None", which GSM-Plus calls critical thinking.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.best_of_n import Key, Outcomes, chosen
from cfprm_jax.evaluation.pool import FIELDS, NO_ANSWER_FIELD, Pool
from cfprm_jax.evaluation.statistics import bootstrap_interval, paired_p_value, spearman

# A field with more values than this identifies questions, not kinds of questions.
_MOST_VALUES = 32

CRITICAL_THINKING = "critical thinking"
DATASET = "dataset"


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the questions: those whose `by` is `value`; by is "" for all of them."""

    by: str
    value: str


def parts(pool: Pool) -> tuple[list[Part], Bool[np.ndarray, "parts questions"]]:
    """All questions, then every part of them that there is, and which questions belong to each."""
    found: list[tuple[Part, np.ndarray]] = [(Part("", ""), np.ones(len(pool.ids), bool))]
    datasets = np.array(pool.datasets)
    if len(set(pool.datasets)) > 1:
        found += [(Part(DATASET, name or "unnamed"), datasets == name) for name in dict.fromkeys(pool.datasets)]
    for field in FIELDS:
        values = [fields.get(field) for fields in pool.fields]
        names = sorted({value for value in values if value is not None}, key=_natural)
        if 1 < len(names) <= _MOST_VALUES:
            found += [(Part(field, name), np.array([value == name for value in values])) for name in names]
    without_answer = np.array([NO_ANSWER_FIELD in fields for fields in pool.fields])
    # Only the data sets that have such questions: the others would be in both parts.
    concerned = np.isin(datasets, list(set(datasets[without_answer])))
    if without_answer.any() and not without_answer[concerned].all():
        found += [
            (Part(CRITICAL_THINKING, "with"), concerned),
            (Part(CRITICAL_THINKING, "without"), concerned & ~without_answer),
        ]
    return [part for part, _ in found], np.stack([members for _, members in found])


def _natural(text: str) -> tuple[int, float, str]:
    """Numbers in their order, before texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


@dataclasses.dataclass(frozen=True)
class AccuracyDifference:
    """Two systems on the same questions: the first minus the second.

    Attributes:
      key: n, method and aggregation.
      accuracy, accuracy2: of the two.
      difference: accuracy - accuracy2.
      ci95: its 95 % interval from a paired bootstrap over questions.
      p_value: two-sided, of no difference.
    """

    key: Key
    accuracy: float
    accuracy2: float
    difference: float
    ci95: tuple[float, float]
    p_value: float


def compare(first: Outcomes, second: Outcomes, resamples: int, seed: int) -> list[AccuracyDifference]:
    """The difference in every accuracy that both have."""
    keys = [key for key in first.keys if key in second.keys]
    one = first.values[:, [first.keys.index(key) for key in keys]]
    two = second.values[:, [second.keys.index(key) for key in keys]]
    intervals = bootstrap_interval(one - two, resamples, seed)
    p_values = paired_p_value(one - two, resamples, seed)
    return [
        AccuracyDifference(
            key=key,
            accuracy=float(one[:, column].mean()),
            accuracy2=float(two[:, column].mean()),
            difference=float((one - two)[:, column].mean()),
            ci95=(float(intervals[column, 0]), float(intervals[column, 1])),
            p_value=float(p_values[column]),
        )
        for column, key in enumerate(keys)
    ]


def aligned(first: Pool, second: Pool, equal_sizes: bool = True) -> Pool:
    """The second pool with its questions in the order of the first.

    Args:
      equal_sizes: whether a question must have as many candidates in both.

    Raises:
      UserError: a question is in one of them only, or has another number of candidates.
    """
    places = {key: place for place, key in enumerate(zip(second.datasets, second.ids, strict=True))}
    keys = list(zip(first.datasets, first.ids, strict=True))
    for key, source in zip(keys, first.sources, strict=True):
        if key not in places:
            raise UserError(f"--input2 has no question {key[1]!r}, which {source} has")
    if len(keys) < len(places):
        missing = next(key for key in places if key not in set(keys))
        raise UserError(f"--input has no question {missing[1]!r}, which {second.sources[places[missing]]} has")
    order = [places[key] for key in keys]
    for place, other in enumerate(order):
        if equal_sizes and first.sizes[place] != second.sizes[other]:
            raise UserError(
                f"question {first.ids[place]!r} has {first.sizes[place]} candidates in {first.sources[place]} and "
                f"{second.sizes[other]} in {second.sources[other]}; two systems are compared on equally many"
            )

    def in_order(values: np.ndarray) -> np.ndarray:
        return values[order]

    return dataclasses.replace(
        second,
        ids=tuple(second.ids[place] for place in order),
        datasets=tuple(second.datasets[place] for place in order),
        sources=tuple(second.sources[place] for place in order),
        fields=tuple(second.fields[place] for place in order),
        costs=tuple(second.costs[place] for place in order),
        present=in_order(second.present),
        correct=in_order(second.correct),
        group=in_order(second.group),
        ranks={name: in_order(values) for name, values in second.ranks.items()},
        weights={name: in_order(values) for name, values in second.weights.items()},
        steps=in_order(second.steps),
        characters=in_order(second.characters),
    )


@dataclasses.dataclass(frozen=True)
class LengthCorrelation:
    """What a score goes with, by Spearman's rank correlation.

    Attributes:
      aggregation: of the step scores.
      quantity: "characters" or "steps".
      candidates: "all", "within questions" (the mean of the questions' own correlations, which the difficulty of
        questions has no part in), or "chosen" (the best of the largest n of each question).
      spearman: None where the score or the quantity does not vary.
      count: candidates, or questions for "within questions".
    """

    aggregation: str
    quantity: str
    candidates: str
    spearman: float | None
    count: int


def correlations(pool: Pool, n: Sequence[int]) -> list[LengthCorrelation]:
    """Whether scores favour long or short candidates; those without a score have no part in it."""
    out = []
    for name, ranks in pool.ranks.items():
        scored = pool.present & np.isfinite(ranks)
        best = chosen(pool, name, max(n))[:, None]
        for quantity, values in (("characters", pool.characters), ("steps", pool.steps)):
            own = [spearman(r[s], v[s]) for r, v, s in zip(ranks, values, scored, strict=True)]
            varying = [value for value in own if value is not None]
            has = np.take_along_axis(scored, best, axis=1)
            picked = [np.take_along_axis(array, best, axis=1)[has] for array in (ranks, values)]
            out += [
                LengthCorrelation(name, quantity, "all", spearman(ranks[scored], values[scored]), int(scored.sum())),
                LengthCorrelation(
                    name,
                    quantity,
                    "within questions",
                    float(np.mean(varying)) if varying else None,
                    len(varying),
                ),
                LengthCorrelation(name, quantity, "chosen", spearman(*picked), int(has.sum())),
            ]
    return out
