"""What is sampled from a prefix of a solution, and the methods' one way to ask for it.

A method is a generator: it yields the prefixes whose rollouts it needs next, and is sent an :class:`Outcome` of each.
So a method is a function of outcomes alone, and many solutions take their rounds together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One continuation of a prefix, to the end of the solution.

    Attributes:
      correct: whether it reaches the answer; None where the grader gave no verdict.
      tokens: tokens sampled.
      cut: whether it was cut at --max_new_tokens; it then counts as a failure.
      steps: steps of the continuation.
      text: the continuation; None where texts are not kept.
    """

    correct: bool | None
    tokens: int
    cut: bool
    steps: int
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The rollouts of one prefix; none where the prefix is too long for the policy."""

    rollouts: tuple[Rollout, ...]

    @property
    def successes(self) -> int | None:
        """Rollouts that reach the answer; None without a verdict on any."""
        return sum(rollout.correct is True for rollout in self.rollouts) if self.verdicts else None

    @property
    def verdicts(self) -> int | None:
        """Rollouts with a verdict: the n of a rate; None where there are none."""
        return sum(rollout.correct is not None for rollout in self.rollouts) or None

    @property
    def rate(self) -> float | None:
        """MC: successes / verdicts."""
        return None if self.successes is None or self.verdicts is None else self.successes / self.verdicts

    @property
    def remaining(self) -> int | None:
        """Steps of the shortest successful rollout."""
        return min((rollout.steps for rollout in self.rollouts if rollout.correct), default=None)


Prefix = tuple[str, ...]
"""The steps of a solution so far; () is the question alone."""

Outcomes = Mapping[Prefix, Outcome]
Method = Generator[Sequence[Prefix], Outcomes, Result]
