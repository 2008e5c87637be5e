"""Scores into rows: candidates files and stepwise trajectories, as JSON objects that keep all else that they hold."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from cfprm_jax.data.candidates import Question, parse_question
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.inference.scorer import Computation, Plan, Scorer
from cfprm_jax.runtime.shards import Shard

SourcedRow = tuple[dict[str, Any], str]
"""A decoded row, and the "file:line" that it comes from."""

SCORES = frozenset({"step_scores", "step_logits", "step_redundancy"})
"""The fields of a solution that scoring adds or replaces."""

# Rows are scored in groups of this many solutions or characters: enough to fill batches, few enough to be written soon.
# The end of a group depends on the rows alone, so that a group interrupted by a kill is repeated with the same rows.
_SOLUTIONS = 512
_CHARACTERS = 200_000


@dataclasses.dataclass
class ScoringCounts:
    """What was done so far.

    Attributes:
      rows, solutions: that were yielded.
      steps: those with a score.
      empty, too_long: solutions without scores.
      split: of candidates' texts.
      ready: rows that are scored and follow at once.
    """

    rows: int = 0
    solutions: int = 0
    steps: int = 0
    empty: int = 0
    too_long: int = 0
    split: SplitCounts = dataclasses.field(default_factory=SplitCounts)
    ready: int = 0


class _Solution(NamedTuple):
    """A solution, the JSON object that gets its scores, and the text that was split, where it had no steps."""

    question: str
    steps: list[str]
    target: dict[str, Any]
    text: str | None = None


class _Waiting(NamedTuple):
    """A row that is not scored yet."""

    row: dict[str, Any]
    source: str
    solutions: list[_Solution]

    @property
    def characters(self) -> int:
        return sum(len(step) for solution in self.solutions for step in solution.steps)


class _Group(NamedTuple):
    """Rows that are scored together, of which the first were written before."""

    rows: list[_Waiting]
    written: int
    plan: Plan


def score_rows(
    items: Iterable[SourcedRow], scorer: Scorer, counts: ScoringCounts, written: int = 0, shard: Shard | None = None
) -> Iterator[SourcedRow]:
    """The rows with "step_scores" and "step_logits" in every solution, in their order.

    With a redundancy output, every solution also has "step_redundancy".

    Rows are modified in place; existing scores are replaced, whatever they are. Candidates with a text and no steps are
    split at the step separator. A solution without steps or over the model's max_length has null scores. counts is
    updated. Rows are read and tokenised ahead, in a thread, while the device computes.

    Args:
      written: number of rows that were written before; they are not yielded, and every score of the others is
        the same to the bit.

      shard: only its rows are yielded. Each question is scored by itself, so that its scores are the same to the bit
        whatever the number of shares, one included.

    Raises:
      UserError: a row is neither candidates nor stepwise, or a score is not a finite number.
    """
    groups = _groups(items, scorer, written, shard)
    with concurrent.futures.ThreadPoolExecutor(1) as ahead:
        following = ahead.submit(next, groups, None)
        computing: tuple[_Group, Computation] | None = None
        while (group := following.result()) is not None or computing is not None:
            started = None if group is None else (group, scorer.start(group.plan))
            if group is not None:
                following = ahead.submit(next, groups, None)
            if computing is not None:
                yield from _scored(*computing, counts, scorer.redundancy)
            computing = started


def _groups(items: Iterable[SourcedRow], scorer: Scorer, written: int, shard: Shard | None = None) -> Iterator[_Group]:
    """The groups of which something is still to be written."""
    waiting: list[_Waiting] = []
    first = solutions = characters = 0
    before: str | None = None  # the question of the previous row, of any share

    def ended() -> Iterator[_Group]:
        nonlocal waiting, first, solutions, characters
        if waiting and first + len(waiting) > written:
            every = [(solution.question, solution.steps) for entry in waiting for solution in entry.solutions]
            yield _Group(waiting, max(0, written - first), scorer.plan(every))
        first += len(waiting)
        waiting, solutions, characters = [], 0, 0

    for row, source in items:
        entry = _Waiting(row, source, _solutions(row, source, scorer))
        question = question_of(row)
        if shard is not None and question != before:
            yield from ended()
        before = question
        if shard is None or shard.owns(question):
            waiting.append(entry)
            solutions, characters = solutions + len(entry.solutions), characters + entry.characters
        if solutions >= _SOLUTIONS or characters >= _CHARACTERS:
            yield from ended()
    yield from ended()


def question_of(row: Mapping[str, Any]) -> str:
    """The question of a candidates row or of a stepwise row; empty where it has none."""
    question = row.get("question" if "candidates" in row else "prompt")
    return question if isinstance(question, str) else ""


def scored_questions(questions: Iterable[Question], scorer: Scorer) -> Iterator[Question]:
    """The same questions with scores, for a table without a file in between."""
    items = ((copy.deepcopy(question.row), question.source) for question in questions)
    for row, source in score_rows(items, scorer, ScoringCounts()):
        yield parse_question(row, source)


def _solutions(row: dict[str, Any], source: str, scorer: Scorer) -> list[_Solution]:
    """The solutions of a candidates row or of a stepwise row."""
    if "candidates" in row:
        # Earlier scores are replaced, so they need not fit the steps, nor be ones at all.
        given = row["candidates"] if isinstance(row["candidates"], list) else ()
        bare = [{k: v for k, v in c.items() if k not in SCORES} if isinstance(c, dict) else c for c in given]
        question = parse_question({**row, "candidates": bare} if bare else row, source)
        split = scorer.encoder.split
        return [
            _Solution(
                question.question,
                list(candidate.steps) if candidate.steps is not None else split(candidate.text or ""),
                target,
                candidate.text if candidate.steps is None else None,
            )
            for candidate, target in zip(question.candidates, row["candidates"], strict=True)
        ]
    prompt, steps = row.get("prompt"), row.get("completions")
    if not isinstance(prompt, str) or not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise UserError(
            f'{source}: neither a candidates row ("question" and "candidates") nor a stepwise one ("prompt", a string, '
            'and "completions", a list of strings)'
        )
    return [_Solution(prompt, steps, row)]


def _scored(group: _Group, computation: Computation, counts: ScoringCounts, redundancy: bool) -> Iterator[SourcedRow]:
    found = iter(computation.outputs())
    for number, entry in enumerate(group.rows):
        for solution in entry.solutions:
            outputs = next(found)
            if outputs is not None and not np.isfinite(outputs).all():
                raise UserError(
                    f"{entry.source}: the model gives a score that is not finite: {outputs.ravel().tolist()!r:.80}"
                )
            z = None if outputs is None else outputs[:, 0]
            solution.target["step_scores"] = None if z is None else sigmoid(z).tolist()
            solution.target["step_logits"] = None if z is None else decimals(z)
            solution.target.pop("step_redundancy", None)  # another model's
            if redundancy:
                redundant = None if outputs is None else sigmoid(outputs[:, 1]).tolist()
                solution.target["step_redundancy"] = redundant
            if number >= group.written:
                counts.solutions += 1
                counts.steps += 0 if z is None else len(z)
                counts.empty += not solution.steps
                counts.too_long += z is None and bool(solution.steps)
                if solution.text is not None:
                    counts.split.add(solution.text, solution.steps)
        if number >= group.written:
            counts.rows += 1
            counts.ready = len(group.rows) - number - 1
            yield entry.row, entry.source


def decimals(values: Float32[np.ndarray, " n"]) -> list[float]:
    """float32 values for JSON: the shortest decimals that are them, which those of their float64 are not."""
    return [float(str(value)) for value in values]


def sigmoid(z: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """1 / (1 + e^-z) in float64, without overflow for any finite z."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(z, np.float64)))
