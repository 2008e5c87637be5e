"""Step labels from counts of rollouts: s_t of n_t completions from the prefix that ends in step t reach the answer.

With the rate p_t = s_t / n_t, p_0 the question's own:

    hard           1 if s_t >= --hard_threshold, else 0 (Math-Shepherd, arXiv 2312.08935)
    soft           p_t (Math-Shepherd, OmegaPRM)
    relative       1 if p_t / p_{t-1} >= --relative_threshold, else 0 (GenPRM, arXiv 2504.00891)
    entropy        ln(1 - p_t + p_t e^eta) / eta (the entropy-regularised mean of ER-PRM, arXiv 2412.11006)
    self_denoised  correct solutions: 1. Others: 1 up to --denoise_window steps before the first error, from there
                   min(p_t / p_0, 1); omitted where p_0 <= --denoise_floor (SCAN, arXiv 2509.16548)
    value          V_t = max(0, V_{t-1} + (1 - V_{t-1}) / (m_t + 1) (1 - 2 r_t)), V_0 = 0, where m_t is the number of
                   steps that the shortest correct continuation still has and r_t is 1 if there is none; m_t is then
                   that of the last step which has one (ReST-MCTS*, arXiv 2406.03816)

The first error is the first step without a success (for hard: with less than --hard_threshold). What follows it is
unlabelled, negative or labelled by its own counts, according to --after_first_error. This includes correct solutions: a
step from which no rollout reaches the answer ends their labels, too, although the solution itself reaches it
(Qwen2.5-Math-PRM, arXiv 2501.07301). Two estimates judge correct solutions by their answer, and find no first error in
them: self_denoised, and value, whose first error is the first step without a correct continuation.

A step without rollouts, or whose rollouts all lack a verdict (n_t = 0), is unlabelled; for hard it is positive where a
later step has a success, since a continuation of that one is a continuation of this one (--unrolled=null leaves it
unlabelled).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from cfprm_jax.config import EstimateConfig
from cfprm_jax.errors import UserError

Label = float | None


@dataclasses.dataclass(frozen=True)
class RolloutCounts:
    """Counts of rollouts of one solution, or of one path of a search tree.

    Attributes:
      successes: s_t of each step, None where it was not rolled; may be a rate where rollouts is 1.
      rollouts: n_t of each step, None where it was not rolled.
      correct: whether the solution reaches the answer; None if that is not known.
      remaining: m_t of each step, None where no correct continuation is known.
      question: successes and rollouts of the question itself.
      question_remaining: steps of the shortest correct solution known.
      context: steps at the beginning whose counts are context, and whose labels are those of other rows.

    Raises:
      UserError: counts of another number of steps, a step with one count alone, or more successes than rollouts.
    """

    successes: Sequence[float | None]
    rollouts: Sequence[int | None]
    correct: bool | None = None
    remaining: Sequence[int | None] | None = None
    question: tuple[float | None, int | None] = (None, None)
    question_remaining: int | None = None
    context: int = 0

    def __post_init__(self) -> None:
        if len(self.successes) != len(self.rollouts):
            raise UserError(f"{len(self.successes)} successes and {len(self.rollouts)} rollouts")
        pairs = [*enumerate(zip(self.successes, self.rollouts, strict=True), 1), (0, self.question)]
        for step, (successes, rollouts) in pairs:
            where = f"step {step}" if step else "question"
            if (successes is None) != (rollouts is None):
                raise UserError(f"{where}: {successes} successes of {rollouts} rollouts: both or neither may be null")
            if successes is not None and rollouts is not None and not 0 <= successes <= rollouts:
                raise UserError(f"{where}: {successes:g} successes of {rollouts} rollouts")
        if self.context > len(self.successes):
            raise UserError(f"context_steps is {self.context}, and there are {len(self.successes)} steps")

    @property
    def rates(self) -> list[float | None]:
        """p_t of each step."""
        return [_rate(s, n) for s, n in zip(self.successes, self.rollouts, strict=True)]

    @property
    def question_rate(self) -> float | None:
        """p_0."""
        return _rate(*self.question)

    def positive(self, threshold: float = 1) -> list[bool | None]:
        """Whether each step has threshold successes, or as many as rollouts if these are fewer; None without counts.

        The last step of a solution has one rollout, which is the solution itself.
        """
        # A rate counts as a success however small it is.
        return [
            None if not n or s is None else s > min(threshold, n) - 1
            for s, n in zip(self.successes, self.rollouts, strict=True)
        ]

    def first_error(self, threshold: float = 1) -> int | None:
        """Index of the first step with less than threshold successes; for a threshold of 1, with none."""
        return next((index for index, positive in enumerate(self.positive(threshold)) if positive is False), None)


def labels(counts: RolloutCounts, config: EstimateConfig) -> list[Label] | str:
    """The label of every step, None where it is unlabelled; or a text, the reason why the solution is omitted.

    Raises:
      UserError: the estimate requires counts that are missing.
    """
    found = _ESTIMATES[config.estimate](counts, config)
    if isinstance(found, str):
        return found
    error = _first_error(counts, config)
    if error is not None and config.after_first_error != "keep":
        after = 0.0 if config.after_first_error == "negative" else None
        found = [label if index <= error else after for index, label in enumerate(found)]
    return [None if index < counts.context else label for index, label in enumerate(found)]


def _first_error(counts: RolloutCounts, config: EstimateConfig) -> int | None:
    """Index of the first error as the estimate defines it; None without one."""
    if config.estimate == "self_denoised" and counts.correct:
        return None
    if config.estimate == "value":
        rolled = zip(_shortest(counts.remaining or ()), counts.rollouts, strict=True)
        return next((index for index, (missing, n) in enumerate(rolled) if missing is None and n), None)
    return counts.first_error(config.hard_threshold if config.estimate == "hard" else 1)


def _shortest(remaining: Sequence[int | None]) -> list[int | None]:
    """m_t of each step; a continuation of a later step is one of every step before it."""
    found: list[int | None] = []
    for own in reversed(remaining):
        known = [m for m in (own, None if not found or found[-1] is None else found[-1] + 1) if m is not None]
        found.append(min(known, default=None))
    return found[::-1]


def _hard(counts: RolloutCounts, config: EstimateConfig) -> list[Label]:
    found: list[Label] = [None if one is None else float(one) for one in counts.positive(config.hard_threshold)]
    if config.unrolled == "positive":
        last = max((index for index, label in enumerate(found) if label == 1), default=-1)
        found[:last] = [1.0 if label is None else label for label in found[:last]]
    return found


def _soft(counts: RolloutCounts, config: EstimateConfig) -> list[Label]:
    del config
    return counts.rates


def _relative(counts: RolloutCounts, config: EstimateConfig) -> list[Label]:
    rates = counts.rates
    found: list[Label] = []
    for before, rate in zip([counts.question_rate, *rates[:-1]], rates, strict=True):
        if rate is None:
            found.append(None)
        elif rate == 0:
            found.append(0.0)
        else:
            found.append(None if before is None else float(rate >= config.relative_threshold * before))
    return found


def _entropy(counts: RolloutCounts, config: EstimateConfig) -> list[Label]:
    growth = math.expm1(config.entropy_eta)
    return [None if p is None else min(math.log1p(p * growth) / config.entropy_eta, 1.0) for p in counts.rates]


def _self_denoised(counts: RolloutCounts, config: EstimateConfig) -> list[Label] | str:
    if counts.correct:
        return [1.0] * len(counts.successes)
    base = counts.question_rate
    if base is None:
        raise UserError("no question_successes of question_rollouts, which --estimate=self_denoised requires")
    if base <= config.denoise_floor:
        return f"incorrect solutions of questions with a rate of at most {config.denoise_floor:g}"
    error = counts.first_error()
    start = (len(counts.successes) if error is None else error) - config.denoise_window
    return [
        1.0 if index < start else (None if rate is None else min(rate / base, 1.0))
        for index, rate in enumerate(counts.rates)
    ]


def _value(counts: RolloutCounts, config: EstimateConfig) -> list[Label]:
    del config
    if counts.remaining is None:
        raise UserError("no remaining_steps, which --estimate=value requires")
    value: float | None = 0.0
    ancestor = counts.question_remaining
    found: list[Label] = []
    for missing, rollouts in zip(_shortest(counts.remaining), counts.rollouts, strict=True):
        ancestor = ancestor if missing is None else missing
        if value is None or ancestor is None or (missing is None and not rollouts):
            value = None
        else:
            value = max(0.0, value + (1 - value) / (ancestor + 1) * (-1 if missing is None else 1))
        found.append(value)
    return found


def _rate(successes: float | None, rollouts: int | None) -> float | None:
    return None if successes is None or not rollouts else successes / rollouts


_ESTIMATES: dict[str, Callable[[RolloutCounts, EstimateConfig], list[Label] | str]] = {
    "hard": _hard,
    "soft": _soft,
    "relative": _relative,
    "entropy": _entropy,
    "self_denoised": _self_denoised,
    "value": _value,
}
