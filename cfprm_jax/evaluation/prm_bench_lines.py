"""PRMBench's steps as arrays, and the PRMScores of its classes, areas and all of it pooled.

Whatever calls steps right is scored here: a model by its thresholds, by thresholds fitted to the other half of the
questions, and judges that do not read. Scores of a line that cannot be given are NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.data.step_cases import CONTROL, Case
from cfprm_jax.evaluation.case_scores import CaseScores
from cfprm_jax.evaluation.statistics import resampled_means
from cfprm_jax.evaluation.step_f1 import UNDEFINED, count, cross_fitted, f1

AREAS = {
    "simplicity": ("redundency", "circular"),
    "soundness": ("counterfactual", "step_contradiction", "domain_inconsistency", "confidence"),
    "sensitivity": ("missing_condition", "deception", "multi_solutions"),
}
"""The classes of each area."""

CLASSES = tuple(name for classes in AREAS.values() for name in classes)
POOLED = "pooled"
LINES = (*CLASSES, *AREAS, POOLED)
"""What has a PRMScore."""

BASELINES = ("length", "position", "all_valid")
"""Judges that do not read: by the characters of a step relative to its solution's mean, by how far into the solution it
is (both by thresholds and directions cross-fitted for each class), and one that calls every step right."""

HALVINGS = 10
"""Random halves of the questions over which cross-fitted scores are averaged: a single one moves them by 0.002."""

_BY_REDUNDANCY = ("redundency", "circular")
_ONE_SIDED = CLASSES.index("multi_solutions")


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """The steps of scored cases as arrays.

    Attributes:
      keys: of the cases.
      classes: of each case its place in CLASSES.
      groups: of each case which question it was made of.
      number_of_groups: how many of those there are.
      new: of each case whether its question is in no training corpus that was named.
      case: of each step.
      wrong: whether it is.
      validity, redundancy: its scores; redundancy is None where the model gives none.
      length: characters relative to the mean of the solution's steps.
      position: 0 at the first step, below 1 at the last.
    """

    keys: tuple[tuple[str, str], ...]
    classes: Int[np.ndarray, " cases"]
    groups: Int[np.ndarray, " cases"]
    number_of_groups: int
    new: Bool[np.ndarray, " cases"]
    case: Int[np.ndarray, " steps"]
    wrong: Bool[np.ndarray, " steps"]
    validity: Float[np.ndarray, " steps"]
    redundancy: Float[np.ndarray, " steps"] | None
    length: Float[np.ndarray, " steps"]
    position: Float[np.ndarray, " steps"]

    def valid(self, threshold: float, redundancy_threshold: float) -> Bool[np.ndarray, " steps"]:
        """The steps that are called right."""
        valid = self.validity > threshold
        if self.redundancy is not None:
            valid = np.where(self.by_redundancy, ~(self.redundancy > redundancy_threshold), valid)
        return valid

    @property
    def by_redundancy(self) -> Bool[np.ndarray, " steps"]:
        """The steps that are judged by redundancy, where there is one."""
        return np.isin(self.classes[self.case], [CLASSES.index(name) for name in _BY_REDUNDANCY])

    def by_class(self, counts: Float[np.ndarray, "cases 4"]) -> Float[np.ndarray, "classes 4"]:
        """The counts of cases added up."""
        out = np.zeros((len(CLASSES), 4))
        np.add.at(out, self.classes, counts)
        return out

    def by_group(self, counts: Float[np.ndarray, "cases 4"]) -> Float[np.ndarray, "groups columns"]:
        """The counts of cases added up by question and class, as outcomes to resample."""
        out = np.zeros((self.number_of_groups, len(CLASSES), 4))
        np.add.at(out, (self.groups, self.classes), counts)
        return out.reshape(self.number_of_groups, -1)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How scores become calls and intervals.

    Attributes:
      threshold: of validity.
      redundancy_threshold: of redundancy.
      excluded: normal forms of questions that may have been seen in training.
      resamples, seed: of the bootstrap; the seed also draws the halves of cross-fitting.
    """

    threshold: float
    redundancy_threshold: float
    excluded: frozenset[str]
    resamples: int
    seed: int


def steps_of(cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], excluded: frozenset[str]) -> Steps:
    """The steps of PRMBench's cases that have scores, without the controls."""
    chosen = [case for case in cases if case.kind == "prm_bench" and case.classification != CONTROL]
    chosen = [case for case in chosen if case.key in scores]
    names = sorted({case.group for case in chosen})
    place = {name: number for number, name in enumerate(names)}
    found = [scores[case.key] for case in chosen]
    sizes = [len(case.steps) for case in chosen]
    lengths = [np.array([len(text) for text in case.steps], np.float64) for case in chosen]
    redundancy = [each.redundancy for each in found if each.redundancy is not None]
    return Steps(
        keys=tuple(case.key for case in chosen),
        classes=np.array([CLASSES.index(case.classification) for case in chosen], int),
        groups=np.array([place[case.group] for case in chosen], int),
        number_of_groups=len(names),
        new=np.array([not case.forms & excluded for case in chosen], bool),
        case=np.repeat(np.arange(len(chosen)), sizes),
        wrong=_joined([np.isin(np.arange(1, size + 1), c.error_steps) for c, size in zip(chosen, sizes, strict=True)]),
        validity=_joined([each.validity for each in found]),
        redundancy=_joined(redundancy) if redundancy else None,
        length=_joined([each / max(each.mean(), 1.0) for each in lengths]),
        position=_joined([np.arange(size) / size for size in sizes]),
    )


def cases_of(cases: Sequence[Case]) -> Int[np.ndarray, " classes"]:
    """How many of the cases belong to each class."""
    named = [case.classification for case in cases if case.kind == "prm_bench" and case.classification != CONTROL]
    return np.array([named.count(name) for name in CLASSES], int)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, bool)


def members_of(line: str) -> list[int]:
    """The places in CLASSES of a line's classes."""
    names = CLASSES if line == POOLED else AREAS.get(line, (line,))
    return [CLASSES.index(name) for name in names]


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """PRMScores of all lines, NaN where one cannot be given, and where they are defined."""

    scores: Float[np.ndarray, " lines"]
    defined: Bool[np.ndarray, " lines"]

    @property
    def given(self) -> Bool[np.ndarray, " lines"]:
        """Where there is one that means something."""
        return np.isfinite(self.scores) & self.defined


def _all_scores(
    by_class: Float[np.ndarray, "*shape classes 4"], floored: bool = False
) -> tuple[Float[np.ndarray, "*shape lines"], Bool[np.ndarray, "*shape lines"]]:
    """PRMScore of every line, and whether each F1 in it is defined.

    Args:
      floored: take 0 for an F1 that is undefined, instead of the -1 of PRMBench's program.
    """
    found, pooled = f1(by_class), f1(by_class.sum(axis=-2))
    if floored:
        found, pooled = found.floored, pooled.floored
    classes, defined = found.mean, found.defined
    classes[..., _ONE_SIDED] = found.f1[..., _ONE_SIDED]
    defined[..., _ONE_SIDED] = found.f1[..., _ONE_SIDED] != UNDEFINED
    areas, areas_defined = [], []
    for name in AREAS:
        members = members_of(name)
        # One after the other, as a loop adds them up: the last digit depends on it.
        total = classes[..., members[0]]
        for member in members[1:]:
            total = total + classes[..., member]
        areas.append(total / len(members))
        areas_defined.append(defined[..., members].all(axis=-1))
    return (
        np.concatenate([classes, np.stack([*areas, pooled.mean], axis=-1)], axis=-1),
        np.concatenate([defined, np.stack([*areas_defined, pooled.defined], axis=-1)], axis=-1),
    )


def line_scores(
    by_class: Float[np.ndarray, "classes 4"],
    present: Bool[np.ndarray, " classes"],
    complete: Bool[np.ndarray, " classes"],
    floored: bool = False,
) -> Scores:
    """The PRMScores of counts.

    Args:
      present: classes with scored cases.
      complete: classes of which all cases have scores; an area or the pooled line has a PRMScore if all of its have.
      floored: take 0 for an F1 that is undefined, instead of the -1 of PRMBench's program.
    """
    scores, defined = _all_scores(by_class, floored)
    allowed = np.array(
        [
            present[place] if place < len(CLASSES) else complete[members_of(name)].all()
            for place, name in enumerate(LINES)
        ]
    )
    return Scores(np.where(allowed, scores, np.nan), defined)


def quantiles(draws: Float[np.ndarray, "resamples columns"]) -> Float[np.ndarray, "columns 2"]:
    """The middle 95 % of each column's numbers; NaN where there are none."""
    out = np.full((draws.shape[1], 2), np.nan)
    some = np.isfinite(draws).any(axis=0)
    if some.any():
        out[some] = np.nanquantile(draws[:, some], (0.025, 0.975), axis=0).T
    return out


def resampled(
    steps: Steps, counts: Float[np.ndarray, "cases 4"], settings: Settings
) -> Float[np.ndarray, "resamples lines"]:
    """PRMScores over resampled questions, NaN where they are not defined."""
    if not steps.number_of_groups:
        return np.full((1, len(LINES)), np.nan)
    draws = []
    for means in resampled_means(steps.by_group(counts), settings.resamples, settings.seed):
        scores, defined = _all_scores(means.reshape(len(means), len(CLASSES), 4))
        draws.append(np.where(defined, scores, np.nan))
    return np.concatenate(draws)


def fitted(steps: Steps, complete: Bool[np.ndarray, " classes"], settings: Settings) -> Float[np.ndarray, " lines"]:
    """PRMScores at cross-fitted thresholds; validity and redundancy have one each. See :func:`_cross_fitted`."""
    none = np.zeros(len(steps.wrong), bool)
    redundancy = none if steps.redundancy is None else steps.by_redundancy

    def judge(chosen: np.ndarray, half: np.ndarray) -> np.ndarray:
        valid, by_validity, by_redundancy = none.copy(), chosen & ~redundancy, chosen & redundancy
        if by_validity.any():
            signal = steps.validity[by_validity]
            valid[by_validity] = cross_fitted([signal], steps.wrong[by_validity], half[by_validity], settings.threshold)
        if steps.redundancy is not None and by_redundancy.any():
            signal = -steps.redundancy[by_redundancy]
            valid[by_redundancy] = cross_fitted(
                [signal], steps.wrong[by_redundancy], half[by_redundancy], -settings.redundancy_threshold
            )
        return valid

    return _cross_fitted(steps, complete, judge, settings.seed)


def baseline(steps: Steps, complete: Bool[np.ndarray, " classes"], name: str, seed: int) -> Float[np.ndarray, " lines"]:
    """PRMScores of one of BASELINES."""

    def judge(chosen: np.ndarray, half: np.ndarray) -> np.ndarray:
        valid = np.ones(len(steps.wrong), bool)
        if name != "all_valid" and chosen.any():
            quantity = (steps.length if name == "length" else steps.position)[chosen]
            valid[chosen] = cross_fitted([-quantity, quantity], steps.wrong[chosen], half[chosen], 0.0)
        return valid

    return _cross_fitted(steps, complete, judge, seed)


def _cross_fitted(
    steps: Steps,
    complete: Bool[np.ndarray, " classes"],
    judge: Callable[[np.ndarray, np.ndarray], np.ndarray],
    seed: int,
) -> Float[np.ndarray, " lines"]:
    """The mean PRMScores over random halvings of the questions, each class judged by itself and all of it as a whole.

    The class without wrong steps, by which nothing can be fitted, is judged as a part of the whole.

    Args:
      judge: given the steps to judge and the half that each belongs to, which steps are called right.
    """
    rng = np.random.default_rng(seed)
    of_class = steps.classes[steps.case]
    everything = np.ones(len(steps.wrong), bool)
    present = np.bincount(steps.classes, minlength=len(CLASSES)) > 0
    total = np.zeros(len(LINES))
    for _ in range(HALVINGS):
        half = (rng.permutation(steps.number_of_groups) % 2 == 1)[steps.groups[steps.case]]
        valid = judge(everything, half)
        together = steps.by_class(count(valid, steps.wrong, steps.case, len(steps.keys)))
        for place in np.flatnonzero(present):
            if place != _ONE_SIDED:
                chosen = of_class == place
                valid[chosen] = judge(chosen, half)[chosen]
        apart = steps.by_class(count(valid, steps.wrong, steps.case, len(steps.keys)))
        found, whole = (line_scores(counts, present, complete, floored=True) for counts in (apart, together))
        total += np.append(found.scores[:-1], whole.scores[-1])
    return total / HALVINGS
