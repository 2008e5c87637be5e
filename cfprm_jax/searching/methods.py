"""Best-of-N, greedy search, beam search and diverse verifier tree search, as pure control over a policy and a reward.

The semantics are those of search-and-learn (huggingface/search-and-learn), with its known faults mended: tokens are
counted, candidates are sorted by score, and fewer than n are not filled up with copies. Scores are read every
`granularity` steps (VG-Search, 2505.11730): between two checks each kept solution takes granularity - 1 steps alone,
then branches for one more, after which all are scored and the best are kept. Granularity 1 is plain beam search.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32

from cfprm_jax.evaluation import aggregation

METHODS = ("best_of_n", "greedy", "beam", "dvts")

Logits = Float32[np.ndarray, " steps"] | None
"""Step logits of a solution; None where it could not be scored."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """A solution so far.

    Attributes:
      steps: texts, without the separator.
      segments: (number, tokens) of each piece that was sampled in one go; copies of a solution share their numbers.
      finish: "stop" at an end-of-turn token, "length" at the limit, None where it continues.
    """

    steps: tuple[str, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()
    finish: str | None = None

    @property
    def tokens(self) -> int:
        """Sampled tokens, separators and the end-of-turn token included."""
        return sum(tokens for _, tokens in self.segments)


class StepPolicy(Protocol):
    """A policy that takes one step at a time in several rows."""

    @property
    def rows(self) -> list[Partial]:
        """The solution of each row."""

    @property
    def sampled(self) -> int:
        """Tokens that were sampled so far, over all questions."""

    @property
    def computed(self) -> int:
        """Tokens that the policy's network processed, prompts included."""

    def begin(self, question: Any) -> None:
        """One row with the prompt of a question."""

    def branch(self, parents: Sequence[int]) -> None:
        """Row i becomes a copy of row parents[i]."""

    def advance(self, to_end: bool = False, greedy: bool = False) -> None:
        """Each row that has not finished takes one step, or all steps until it finishes."""

    def mark(self) -> Any:
        """The present state, for :meth:`restore`."""

    def restore(self, mark: Any) -> None:
        """Undo what :meth:`advance` did since mark; no :meth:`branch` may lie between."""


class StepReward(Protocol):
    """A PRM."""

    @property
    def computed(self) -> int:
        """Tokens that its network processed so far."""

    @property
    def requested(self) -> int:
        """Tokens of all solutions that were scored so far."""

    @property
    def calls(self) -> int:
        """Number of calls of :meth:`score`."""

    def score(self, question: str, solutions: Sequence[Sequence[str]]) -> list[Logits]:
        """Step logits of each solution."""


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """How to search.

    Attributes:
      n: number of solutions searched in parallel, and the maximum number of results.
      width: continuations of each kept solution; n / width are kept. Greedy search keeps one of n.
      granularity: steps between checks.
      max_steps: steps after which solutions run to their end.
      lookahead: greedy steps ahead of an evaluation, which are scored and discarded.
      aggregation: of step scores: "last", "min", "product" or "mean".
      keep_duplicates: whether solutions of equal text may be kept together.
    """

    method: str = "beam"
    n: int = 16
    width: int = 4
    granularity: int = 1
    max_steps: int = 40
    lookahead: int = 0
    aggregation: str = "last"
    keep_duplicates: bool = False

    @property
    def checks(self) -> int:
        """Times that solutions are scored, at most."""
        return max(1, math.ceil(self.max_steps / self.granularity))


@dataclasses.dataclass(frozen=True)
class Found:
    """A solution that came out."""

    partial: Partial
    logits: Logits
    rank: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a search of one question cost.

    Attributes:
      policy_tokens, reward_tokens: tokens that the networks processed, prompts included.
      reward_requested: tokens of all solutions that were scored, as if none were cached.
      sampled_tokens: tokens that the policy chose; discarded_tokens are those in no solution that came out.
      calls: of the reward.
    """

    policy_tokens: int
    reward_tokens: int
    reward_requested: int
    sampled_tokens: int
    discarded_tokens: int
    calls: int


def search(
    prompt: Any, question: str, policy: StepPolicy, reward: StepReward, options: SearchOptions
) -> tuple[list[Found], Cost]:
    """The solutions of one question, the best first, and their cost.

    Args:
      prompt: of the policy.
      question: for the reward.
    """
    before = (policy.computed, reward.computed, reward.requested, policy.sampled, reward.calls)
    run = _Search(question, policy, reward, options)
    policy.begin(prompt)
    if options.method == "best_of_n":
        found = run.independent()
    elif options.method == "beam":
        found = run.beam()
    elif options.method == "dvts":
        found = run.trees(options.n // options.width, options.width)
    else:
        found = run.trees(1, options.n)
    # Sorting is stable: of equal ones the first comes first.
    found = sorted(found, key=lambda one: -one.rank)[: 1 if options.method == "greedy" else options.n]
    now = (policy.computed, reward.computed, reward.requested, policy.sampled, reward.calls)
    computed, rewarded, requested, sampled, calls = (int(b - a) for a, b in zip(before, now, strict=True))
    kept = sum(tokens for _, tokens in {segment for one in found for segment in one.partial.segments})
    return found, Cost(computed, rewarded, requested, sampled, sampled - kept, calls)


class _Search:
    """One question's search."""

    def __init__(self, question: str, policy: StepPolicy, reward: StepReward, options: SearchOptions) -> None:
        self._question, self._policy, self._reward, self._options = question, policy, reward, options

    def independent(self) -> list[Found]:
        """n solutions to their end, scored once."""
        self._policy.branch([0] * self._options.n)
        self._policy.advance(to_end=True)
        return self._scored()

    def beam(self) -> list[Found]:
        """The best n / width of all are kept."""
        options = self._options
        kept = options.n // options.width
        completed: list[Found] = []
        self._policy.branch([0] * kept)
        for check in range(options.checks):
            self._unscored()
            live = self._live()
            # What has finished alone is scored with the others, in its row.
            over = [i for i in range(len(self._policy.rows)) if i not in live]
            branches = [live[i % len(live)] for i in range(options.n - len(over))] if live else []
            self._policy.branch([*branches, *over])
            self._policy.advance(to_end=check == options.checks - 1)
            scored = self._scored()
            completed += [one for one in scored if not _continues(one)]
            live = self._best([i for i, one in enumerate(scored) if _continues(one)], scored, kept)
            if not live or len(completed) >= options.n:
                break
            self._policy.branch(live)
        return completed if options.keep_duplicates else _different(completed)

    def trees(self, trees: int, width: int) -> list[Found]:
        """Each of several trees keeps its best; one that has finished gives its last continuations that have, too."""
        options = self._options
        completed: list[Found] = []
        self._policy.branch([0] * trees)
        for check in range(options.checks):
            self._unscored()
            count = len(self._policy.rows)
            self._policy.branch([i for i in range(count) for _ in range(width)])
            self._policy.advance(to_end=check == options.checks - 1)
            scored = self._scored()
            going = []
            for tree in range(count):
                own = list(range(tree * width, (tree + 1) * width))
                best = max(own, key=lambda i: (scored[i].rank, -i))
                if _continues(scored[best]):
                    going.append(best)
                else:
                    # What finished before it was branched for is in all its rows.
                    over = {scored[i].partial.segments: scored[i] for i in own[::-1] if not _continues(scored[i])}
                    completed += list(over.values())[::-1]
            if not going:
                break
            self._policy.branch(going)
        return completed if options.keep_duplicates else _different(completed)

    def _unscored(self) -> None:
        """The steps between two checks, but the one that is branched for."""
        for _ in range(self._options.granularity - 1):
            self._policy.advance()

    def _live(self) -> list[int]:
        return [i for i, row in enumerate(self._policy.rows) if row.finish is None]

    def _scored(self) -> list[Found]:
        """Every row with its logits, and what it ranks by: with a lookahead, what lies ahead of it."""
        rows, options = list(self._policy.rows), self._options
        ahead = rows
        if options.lookahead and any(row.finish is None for row in rows):
            mark = self._policy.mark()
            for _ in range(options.lookahead):
                self._policy.advance(greedy=True)
            ahead = list(self._policy.rows)
            self._policy.restore(mark)
        logits = list(self._reward.score(self._question, [row.steps for row in ahead]))
        # What lies ahead may be too long where the row itself is not.
        if again := [i for i, z in enumerate(logits) if z is None and ahead[i].steps != rows[i].steps]:
            scored = self._reward.score(self._question, [rows[i].steps for i in again])
            for i, z in zip(again, scored, strict=True):
                logits[i] = z
        ranks = aggregation.rank(logits, options.aggregation).tolist()
        return [
            Found(row, None if z is None else z[: len(row.steps)], own)
            for row, z, own in zip(rows, logits, ranks, strict=True)
        ]

    def _best(self, live: Sequence[int], scored: Sequence[Found], kept: int) -> list[int]:
        """The rows of the best that continue, the first of equal ones first."""
        ranked = sorted(live, key=lambda i: -scored[i].rank)
        if not self._options.keep_duplicates:
            seen: dict[tuple[str, ...], int] = {}
            for i in ranked:
                seen.setdefault(scored[i].partial.steps, i)
            ranked = list(seen.values())
        return ranked[:kept]


def _continues(one: Found) -> bool:
    """Whether a solution has neither finished nor become too long to be scored."""
    return one.partial.finish is None and one.rank > -math.inf


def _different(found: Sequence[Found]) -> list[Found]:
    """The first of each text."""
    seen: dict[tuple[str, ...], Found] = {}
    for one in found:
        seen.setdefault(one.partial.steps, one)
    return list(seen.values())
