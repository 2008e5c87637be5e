"""PRMBench: PRMScore by class, by area and over all, with intervals, baselines and cross-fitted thresholds.

Song et al., "PRMBench: A Fine-grained and Challenging Benchmark for Process-Level Reward Models". A step is called
right where its score is above a threshold; in the classes of redundant and circular steps, where the model gives a
redundancy, wherever that is not above a threshold of its own. Counts are pooled over the steps of a class, PRMScore is
the mean of the F1 of right steps and that of wrong ones (of multi_solutions, which has no wrong step, the first alone),
an area is the mean of its classes, and the pooled line has the counts of all classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from cfprm_jax.data.step_cases import CONTROL, Case
from cfprm_jax.evaluation.case_scores import CaseScores
from cfprm_jax.evaluation.prm_bench_lines import (
    AREAS,
    BASELINES,
    CLASSES,
    LINES,
    Settings,
    Steps,
    baseline,
    cases_of,
    fitted,
    line_scores,
    members_of,
    quantiles,
    resampled,
    steps_of,
)
from cfprm_jax.evaluation.statistics import two_sided_p_value
from cfprm_jax.evaluation.step_f1 import count, f1


@dataclasses.dataclass(frozen=True)
class PRMBenchLine:
    """What has a PRMScore: a class, an area, or all of it pooled.

    Attributes:
      name: one of LINES.
      cases: how many were given.
      scored: how many of them have scores; areas and the pooled line have a PRMScore only if all of every class have.
      new_cases: how many of the scored ones are not among the excluded questions.
      steps, wrong_steps: of the scored cases.
      precision, recall, f1, negative_precision, negative_recall, negative_f1: as PRMBench's program gives them, -1
        where that has no value; None for areas.
      prm_score: that of PRMBench's program; None where it cannot be given.
      defined: whether no F1 in it is -1, which would make it meaningless.
      ci95: 95 % interval from a bootstrap over questions.
      cross_fitted: at the threshold that is best for this line in the other half of the questions; multi_solutions,
        which has no wrong steps to fit one by, at that of the pooled line; an area is the mean of its classes.
      baselines: PRMScore of each of BASELINES.
      new_prm_score, new_ci95: over cases that are not among the excluded questions.
      accuracy_correct, accuracy_wrong, accuracy: shares of right, wrong and all steps called what they are.
      accuracy_first_error: share of first wrong steps called wrong.
      similarity: mean of |share called right in the case - share called right in its control|.
    """

    name: str
    cases: int
    scored: int
    new_cases: int
    steps: int
    wrong_steps: int
    precision: float | None
    recall: float | None
    f1: float | None
    negative_precision: float | None
    negative_recall: float | None
    negative_f1: float | None
    prm_score: float | None
    defined: bool
    ci95: tuple[float, float] | None
    cross_fitted: float | None
    baselines: Mapping[str, float | None]
    new_prm_score: float | None
    new_ci95: tuple[float, float] | None
    accuracy_correct: float | None
    accuracy_wrong: float | None
    accuracy: float | None
    accuracy_first_error: float | None
    similarity: float | None


def measure(
    cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], settings: Settings
) -> list[PRMBenchLine]:
    """Every line of LINES; those without any case have no numbers."""
    steps = steps_of(cases, scores, settings.excluded)
    valid = steps.valid(settings.threshold, settings.redundancy_threshold)
    counts = count(valid, steps.wrong, steps.case, len(steps.keys))
    new_counts = counts * steps.new[:, None]
    given = cases_of(cases)
    scored = np.bincount(steps.classes, minlength=len(CLASSES))
    new = np.bincount(steps.classes[steps.new], minlength=len(CLASSES))
    complete = (given > 0) & (scored == given)
    by_class = steps.by_class(counts)
    main = line_scores(by_class, scored > 0, complete)
    main_ci = quantiles(resampled(steps, counts, settings))
    seen = bool(settings.excluded)
    fresh = line_scores(steps.by_class(new_counts), new > 0, complete & (new > 0))
    fresh_ci = quantiles(resampled(steps, new_counts, settings)) if seen else np.full((len(LINES), 2), np.nan)
    best = fitted(steps, complete, settings)
    judges = {name: baseline(steps, complete, name, settings.seed) for name in BASELINES}
    first, similarity = _case_measures(cases, scores, steps, valid, counts=counts, settings=settings)
    out = []
    for place, name in enumerate(LINES):
        members = members_of(name)
        of_line, inside = by_class[members].sum(axis=0), np.isin(steps.classes, members)
        tp, fp, tn, fn = of_line
        out.append(
            PRMBenchLine(
                name=name,
                cases=int(given[members].sum()),
                scored=int(scored[members].sum()),
                new_cases=int(new[members].sum()),
                steps=int(of_line.sum()),
                wrong_steps=int(fp + tn),
                **_details(name, of_line, bool(inside.any())),
                prm_score=_value(main.scores[place]),
                defined=bool(main.defined[place]),
                ci95=_pair(main_ci[place]) if main.given[place] else None,
                cross_fitted=_value(best[place]),
                baselines={each: _value(found[place]) for each, found in judges.items()},
                new_prm_score=_value(fresh.scores[place]) if seen and fresh.given[place] else None,
                new_ci95=_pair(fresh_ci[place]) if seen and fresh.given[place] else None,
                accuracy_correct=_share(tp, tp + fn),
                accuracy_wrong=_share(tn, tn + fp),
                accuracy=_share(tp + tn, of_line.sum()),
                accuracy_first_error=_mean([hit for hit, member in zip(first, inside, strict=True) if member]),
                similarity=_mean([gap for gap, member in zip(similarity, inside, strict=True) if member]),
            )
        )
    return out


def _details(name: str, counts: Float[np.ndarray, " 4"], scored: bool) -> dict[str, float | None]:
    """Precisions, recalls and F1 of a class or the pooled line; an area, a mean of classes, has none."""
    found = f1(counts)._asdict()
    return {field: float(value) if scored and name not in AREAS else None for field, value in found.items()}


def _case_measures(
    cases: Sequence[Case],
    scores: Mapping[tuple[str, str], CaseScores],
    steps: Steps,
    valid: Bool[np.ndarray, " steps"],
    *,
    counts: Float[np.ndarray, "cases 4"],
    settings: Settings,
) -> tuple[list[float | None], list[float | None]]:
    """Of each scored case whether its first error is found, and how far it is from its control; None where neither."""
    controls = {
        case.idx: float(np.mean(scores[case.key].validity > settings.threshold))
        for case in cases
        if case.classification == CONTROL and case.key in scores
    }
    sizes = np.bincount(steps.case, minlength=len(steps.keys))
    starts = np.cumsum(sizes) - sizes
    first: list[float | None] = []
    gap: list[float | None] = []
    for (_, idx), start, size, (tp, fp, _, _) in zip(steps.keys, starts, sizes, counts, strict=True):
        errors = np.flatnonzero(steps.wrong[start : start + size])
        first.append(float(not valid[start + errors[0]]) if len(errors) else None)
        # A control in which nothing is called right is left out by PRMBench's program.
        control = controls.get(idx)
        gap.append(abs((tp + fp) / size - control) if control else None)
    return first, gap


def _value(score: float) -> float | None:
    return None if np.isnan(score) else float(score)


def _pair(pair: Float[np.ndarray, " 2"]) -> tuple[float, float] | None:
    return None if np.isnan(pair).any() else (float(pair[0]), float(pair[1]))


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


@dataclasses.dataclass(frozen=True)
class PRMScoreDifference:
    """Two models on the same cases: the first minus the second.

    Attributes:
      name: one of LINES.
      prm_score, prm_score2: of the two, over the cases that both have scored; of areas and the pooled line only where
        those are all cases.
      difference: prm_score - prm_score2.
      ci95: its 95 % interval from a paired bootstrap over questions.
      p_value: two-sided, of no difference.
    """

    name: str
    prm_score: float
    prm_score2: float
    difference: float
    ci95: tuple[float, float]
    p_value: float


def compare(
    cases: Sequence[Case],
    scores: Mapping[tuple[str, str], CaseScores],
    scores2: Mapping[tuple[str, str], CaseScores],
    settings: Settings,
) -> list[PRMScoreDifference]:
    """The difference in every line that both models have."""
    both = scores.keys() & scores2.keys()
    given = cases_of(cases)
    found, draws = [], []
    for each in (scores, scores2):
        steps = steps_of(cases, {key: each[key] for key in both}, settings.excluded)
        valid = steps.valid(settings.threshold, settings.redundancy_threshold)
        counts = count(valid, steps.wrong, steps.case, len(steps.keys))
        scored = np.bincount(steps.classes, minlength=len(CLASSES))
        line = line_scores(steps.by_class(counts), scored > 0, (given > 0) & (scored == given))
        found.append(np.where(line.given, line.scores, np.nan))
        draws.append(resampled(steps, counts, settings))
    apart = draws[0] - draws[1]
    intervals, p_values = quantiles(apart), two_sided_p_value(apart)
    return [
        PRMScoreDifference(
            name=name,
            prm_score=float(found[0][place]),
            prm_score2=float(found[1][place]),
            difference=float(found[0][place] - found[1][place]),
            ci95=(float(intervals[place, 0]), float(intervals[place, 1])),
            p_value=float(p_values[place]),
        )
        for place, name in enumerate(LINES)
        if np.isfinite(found[0][place]) and np.isfinite(found[1][place])
    ]
