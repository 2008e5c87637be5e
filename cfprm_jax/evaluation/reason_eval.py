"""ReasonEval's meta-evaluation: macro-F1 and AUC by step and by solution, for invalid and for redundant steps.

Xia et al., "Evaluating Mathematical Reasoning Beyond Accuracy", 2024. Invalid steps are found by validity, redundant
ones by redundancy where the model gives one and by validity where it does not. The validity of a step of several texts
is the lowest of theirs, that of a solution the lowest of its steps'; of redundancy it is the highest. Steps after the
first error are neither right nor wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.data.step_cases import Case
from cfprm_jax.evaluation.case_scores import CaseScores
from cfprm_jax.evaluation.prm_bench_lines import HALVINGS, Settings, quantiles
from cfprm_jax.evaluation.statistics import resampled_means
from cfprm_jax.evaluation.step_f1 import count, cross_fitted, f1


@dataclasses.dataclass(frozen=True)
class LevelMeasures:
    """Detection of wrong steps, or of wrong solutions.

    Attributes:
      right, wrong: how many of each.
      macro_f1: mean of the F1 of right and of wrong ones; None where one of them has none.
      macro_f1_ci95: its 95 % interval from a bootstrap over questions.
      cross_fitted: macro-F1 at the threshold that is best in the other half of the questions.
      auc: area under the ROC curve; None where all are right or all are wrong.
      auc_ci95: its interval.
    """

    right: int
    wrong: int
    macro_f1: float | None
    macro_f1_ci95: tuple[float, float] | None
    cross_fitted: float | None
    auc: float | None
    auc_ci95: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class ReasonEvalLine:
    """One file of ReasonEval.

    Attributes:
      name: of the file, without its ending.
      kind: "invalid" or "redundant": what a wrong step is.
      signal: "validity" or "redundancy", the scores that it is measured on.
      cases: how many were given.
      scored: how many of them have scores, which the rest is of.
      step, solution: the measures of each.
    """

    name: str
    kind: str
    signal: str
    cases: int
    scored: int
    step: LevelMeasures
    solution: LevelMeasures


def measure(
    cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], settings: Settings
) -> list[ReasonEvalLine]:
    """A line for each file of ReasonEval among the cases."""
    names = dict.fromkeys(case.classification for case in cases if case.kind != "prm_bench")
    return [_line([case for case in cases if case.classification == name], scores, settings) for name in names]


def _line(cases: Sequence[Case], scores: Mapping[tuple[str, str], CaseScores], settings: Settings) -> ReasonEvalLine:
    found = [case for case in cases if case.key in scores]
    kind = cases[0].kind
    by_redundancy = kind == "redundant" and bool(found) and scores[found[0].key].redundancy is not None
    threshold = -settings.redundancy_threshold if by_redundancy else settings.threshold
    signals = [_signal(case, scores[case.key], by_redundancy) for case in found]
    names = sorted({case.group for case in found})
    groups = np.array([names.index(case.group) for case in found], int)
    judged = [case.judged for case in found]
    wrong = [np.isin(np.arange(1, case.judged + 1), case.error_steps) for case in found]

    def level(signal: list[np.ndarray], wrong: list[np.ndarray], group: np.ndarray, strict: bool) -> LevelMeasures:
        if not signal:
            return LevelMeasures(0, 0, None, None, None, None, None)
        return _level(
            np.concatenate(signal),
            np.concatenate(wrong),
            group,
            groups=len(names),
            threshold=threshold,
            strict=strict,
            settings=settings,
        )

    return ReasonEvalLine(
        name=cases[0].classification,
        kind=kind,
        signal="redundancy" if by_redundancy else "validity",
        cases=len(cases),
        scored=len(found),
        step=level(
            [signal[:size] for signal, size in zip(signals, judged, strict=True)],
            wrong,
            np.repeat(groups, judged),
            False,
        ),
        solution=level(
            [signal.min(keepdims=True) for signal in signals],
            [np.array([each.any()]) for each in wrong],
            groups,
            True,
        ),
    )


def _signal(case: Case, scores: CaseScores, by_redundancy: bool) -> Float[np.ndarray, " steps"]:
    """What is high where a step is right."""
    values = -scores.redundancy if by_redundancy and scores.redundancy is not None else scores.validity
    if not case.pieces:
        return values
    sizes = np.array(case.pieces)
    return np.minimum.reduceat(values, np.cumsum(sizes) - sizes)


def _level(
    signal: Float[np.ndarray, " n"],
    wrong: Bool[np.ndarray, " n"],
    group: Int[np.ndarray, " n"],
    *,
    groups: int,
    threshold: float,
    strict: bool,
    settings: Settings,
) -> LevelMeasures:
    """The measures.

    Args:
      strict: a signal equal to the threshold counts as a mistake, whatever is right, as in ReasonEval's own program for
        solutions; else it means wrong.
    """
    right_called, wrong_called = signal > threshold, signal < threshold if strict else ~(signal > threshold)
    counts = np.zeros((groups, 4))
    kinds = (~wrong & right_called, wrong & ~wrong_called, wrong & wrong_called, ~wrong & ~right_called)
    for place, kind in enumerate(kinds):
        counts[:, place] = np.bincount(group, kind, minlength=groups)
    found = f1(counts.sum(axis=0))
    rng, fits = np.random.default_rng(settings.seed), []
    for _ in range(HALVINGS):
        valid = cross_fitted([signal], wrong, (rng.permutation(groups) % 2 == 1)[group], threshold)
        fits.append(f1(count(valid, wrong, np.zeros(len(wrong), int), 1)[0]).floored.mean)
    both = bool(wrong.any()) and not wrong.all()
    f1_draws, auc_draws = [], []
    # AUC is a ratio of sums over pairs, so pairs of questions are all that resampling needs.
    pairs, rights, wrongs = _pairs(signal, wrong, group, groups)
    for weights in resampled_means(np.eye(groups), settings.resamples, settings.seed):
        resampled = f1(weights @ counts)
        f1_draws.append(np.where(resampled.defined, resampled.mean, np.nan))
        with np.errstate(invalid="ignore"):
            auc_draws.append(
                np.einsum("rg,rg->r", weights @ pairs, weights) / ((weights @ rights) * (weights @ wrongs))
            )
    draws = quantiles(np.stack([np.concatenate(f1_draws), np.concatenate(auc_draws)], axis=-1))
    defined = bool(found.defined)
    return LevelMeasures(
        right=int((~wrong).sum()),
        wrong=int(wrong.sum()),
        macro_f1=float(found.mean) if defined else None,
        macro_f1_ci95=(float(draws[0, 0]), float(draws[0, 1])) if defined else None,
        cross_fitted=float(np.mean(fits)) if both else None,
        auc=float(pairs.sum() / (rights.sum() * wrongs.sum())) if both else None,
        auc_ci95=(float(draws[1, 0]), float(draws[1, 1])) if both else None,
    )


def _pairs(
    signal: Float[np.ndarray, " n"], wrong: Bool[np.ndarray, " n"], group: Int[np.ndarray, " n"], groups: int
) -> tuple[Float[np.ndarray, "groups groups"], Float[np.ndarray, " groups"], Float[np.ndarray, " groups"]]:
    """How many pairs of a right one of one question and a wrong one of another are in order, ties counting half.

    Returns:
      pairs by question of the right one and of the wrong one, and how many right and wrong ones each question has.
    """
    pairs = np.zeros((groups, groups))
    right_signal, right_group = signal[~wrong], group[~wrong]
    for place in np.flatnonzero(wrong):
        won = (right_signal > signal[place]) + 0.5 * (right_signal == signal[place])
        pairs[:, group[place]] += np.bincount(right_group, won, minlength=groups)
    rights = np.bincount(right_group, minlength=groups).astype(np.float64)
    return pairs, rights, np.bincount(group[wrong], minlength=groups).astype(np.float64)
