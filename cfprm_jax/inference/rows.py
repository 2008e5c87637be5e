"""Scores into rows: candidates files and stepwise trajectories, as JSON objects that keep all else that they hold."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.candidates import Question, parse_question
from cfprm_jax.inference.scorer import Scorer

SourcedRow = tuple[dict[str, Any], str]
"""A decoded row, and the "file:line" that it comes from."""

# Solutions that are scored together: enough to fill batches whatever their length, few enough to be written soon.
_CHUNK = 512


@dataclasses.dataclass
class Counts:
    """What was done so far; solutions are all of them, and steps those with a score."""

    rows: int = 0
    solutions: int = 0
    steps: int = 0
    empty: int = 0
    too_long: int = 0


class _Solution(NamedTuple):
    """A solution, and the JSON object that gets its scores."""

    question: str
    steps: list[str]
    target: dict[str, Any]


class _Waiting(NamedTuple):
    """A row that is not scored yet."""

    row: dict[str, Any]
    source: str
    solutions: list[_Solution]


def score_rows(items: Iterable[SourcedRow], scorer: Scorer, counts: Counts) -> Iterator[SourcedRow]:
    """The rows with "step_scores" and "step_logits" in every solution, in their order.

    A row is changed in place, and scores that it already has are replaced. Candidates with a text and no steps are
    split at the step separator. A solution without steps or over the model's max_length gets null. counts is kept up
    to date.

    Raises:
      UserError: a row is neither candidates nor stepwise, or a score is not a finite number.
    """
    waiting: list[_Waiting] = []
    for row, source in items:
        waiting.append(_Waiting(row, source, _solutions(row, source, scorer)))
        if sum(len(entry.solutions) for entry in waiting) >= _CHUNK:
            yield from _score(waiting, scorer, counts)
            waiting = []
    yield from _score(waiting, scorer, counts)


def scored_questions(questions: Iterable[Question], scorer: Scorer) -> Iterator[Question]:
    """The same questions with scores, for a table without a file in between."""
    items = ((copy.deepcopy(question.row), question.source) for question in questions)
    for row, source in score_rows(items, scorer, Counts()):
        yield parse_question(row, source)


def _solutions(row: dict[str, Any], source: str, scorer: Scorer) -> list[_Solution]:
    """The solutions of a candidates row or of a stepwise row."""
    if "candidates" in row:
        question = parse_question(row, source)
        split = scorer.encoder.split
        return [
            _Solution(
                question.question,
                list(candidate.steps) if candidate.steps is not None else split(candidate.text or ""),
                target,
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


def _score(waiting: list[_Waiting], scorer: Scorer, counts: Counts) -> Iterator[SourcedRow]:
    every = [solution for entry in waiting for solution in entry.solutions]
    logits = scorer.score([(solution.question, solution.steps) for solution in every])
    sources = (entry.source for entry in waiting for _ in entry.solutions)
    for solution, z, source in zip(every, logits, sources, strict=True):
        if z is not None and not np.isfinite(z).all():
            raise UserError(f"{source}: the model gives a score that is not finite: {z.tolist()!r:.80}")
        solution.target["step_scores"] = None if z is None else sigmoid(z).tolist()
        # The shortest decimal that is this float32, which float64's would not be.
        solution.target["step_logits"] = None if z is None else [float(str(value)) for value in z]
        counts.solutions += 1
        counts.steps += 0 if z is None else len(z)
        counts.empty += not solution.steps
        counts.too_long += z is None and bool(solution.steps)
    counts.rows += len(waiting)
    yield from ((entry.row, entry.source) for entry in waiting)


def sigmoid(z: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """1 / (1 + e^-z) in float64, without overflow for any finite z."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(z, np.float64)))
