"""The candidates file: questions with solutions to choose from, before and after scoring.

JSON lines, plain or gzip-compressed, one question a row:

    {"id", "question", "answer", "dataset"?,
     "candidates": [{"text" and/or "steps", "step_scores"?, "step_logits"?, "predicted"?, "correct"?}, ...]}

Steps that are given are used as they are; otherwise the text is to be split. "step_scores" (in [0, 1]) and
"step_logits" have one entry a step, and are null where the scorer could not score the candidate. Everything else that a
row holds is ignored here, and kept by commands that write the rows again. Rows stream: one question is in memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.errors import UserError

_KINDS = {str: "a string", bool: "true or false", list: "an array", dict: "an object", type(None): "null"}


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """One solution; what its row does not have is None.

    Attributes:
      text: the solution as one text.
      steps: its steps, possibly none of them.
      step_scores: float64 [steps] in [0, 1].
      step_logits: float64 [steps]; only beside step_scores.
      predicted: the answer that it gives.
      correct: whether that is the right one.
      was_scored: whether the row has "step_scores" at all; null is of a candidate that could not be scored.
    """

    text: str | None = None
    steps: tuple[str, ...] | None = None
    step_scores: Float[np.ndarray, " steps"] | None = None
    step_logits: Float[np.ndarray, " steps"] | None = None
    predicted: str | None = None
    correct: bool | None = None
    was_scored: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """One row of a candidates file; source is its file and line, and row the JSON object itself."""

    id: str | int
    question: str
    answer: str
    candidates: tuple[Candidate, ...]
    source: str
    dataset: str | None = None
    row: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_candidates(paths: Paths) -> Iterator[Question]:
    """The questions of candidates files, in file order.

    Args:
      paths: a file, a glob pattern, or a sequence of them.

    Raises:
      UserError: naming file, line and field of an invalid value; a question that occurs twice (the same id and
        dataset); or a file that is missing, empty or damaged.
    """
    return (question for question, _ in read_candidates_by_bytes(paths))


def read_candidates_by_bytes(paths: Paths) -> Iterator[tuple[Question, float]]:
    """As :func:`read_candidates`, each question with the number of bytes of the files up to its end."""
    before = 0
    seen: dict[tuple[str | None, str | int], str] = {}
    for file in expand(paths):
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            question = parse_question(row.data, source)
            key = (question.dataset, question.id)
            if key in seen:
                raise UserError(f'{source}: "id" {question.id!r} was already that of {seen[key]}')
            seen[key] = source
            yield question, before + row.fraction * file.size
        before += file.size


def parse_question(row: dict[str, Any], source: str) -> Question:
    """The question of a decoded row; source ("file:line") is for messages.

    Raises:
      UserError: naming source and field.
    """
    raw = _get(row, "candidates", list, source)
    if not raw:
        raise UserError(f'{source}: "candidates" is empty, expected at least one')
    candidates = []
    for number, candidate in enumerate(raw):
        where = f"{source}: candidate {number}"
        if not isinstance(candidate, dict):
            raise UserError(f"{where}: expected an object, found {_kind(candidate)}")
        candidates.append(_candidate(candidate, where))
    return Question(
        id=_id(row, source),
        question=_get(row, "question", str, source),
        answer=_get(row, "answer", str, source),
        candidates=tuple(candidates),
        source=source,
        dataset=_get(row, "dataset", str, source, optional=True),
        row=row,
    )


def _candidate(row: dict[str, Any], where: str) -> Candidate:
    text = _get(row, "text", str, where, optional=True)
    steps = _get(row, "steps", list, where, optional=True)
    if text is None and steps is None:
        raise UserError(f'{where}: neither "text" nor "steps"')
    for step in steps or ():
        if not isinstance(step, str):
            raise UserError(f'{where}: "steps" holds {_kind(step)}, expected strings')
    scores, logits = _numbers(row, "step_scores", where), _numbers(row, "step_logits", where)
    if scores is not None and not np.all((scores >= 0) & (scores <= 1)):
        outside = scores[~((scores >= 0) & (scores <= 1))][0]
        raise UserError(f'{where}: "step_scores" holds {outside:g}, expected numbers in [0, 1]')
    if scores is not None and steps is not None and len(scores) != len(steps):
        raise UserError(f"{where}: {len(steps)} steps and {len(scores)} step_scores")
    if logits is not None and (scores is None or len(logits) != len(scores)):
        found = "none" if scores is None else len(scores)
        raise UserError(f"{where}: {len(logits)} step_logits and {found} step_scores")
    return Candidate(
        text=text,
        steps=None if steps is None else tuple(steps),
        step_scores=scores,
        step_logits=logits,
        predicted=_get(row, "predicted", str, where, optional=True),
        correct=_get(row, "correct", bool, where, optional=True),
        was_scored="step_scores" in row,
    )


def _get(row: dict[str, Any], name: str, kind: type, where: str, optional: bool = False) -> Any:
    """A field of the given type; an optional one that is absent or null is None."""
    value = row.get(name)
    if optional and value is None:
        return None
    if name not in row:
        raise UserError(f'{where}: no "{name}"')
    if not isinstance(value, kind):
        raise UserError(f'{where}: "{name}" is {_kind(value)}, expected {_KINDS[kind]}')
    return value


def _id(row: dict[str, Any], source: str) -> str | int:
    """A text or a whole number, and no true or false, which Python counts among the numbers."""
    if type(row.get("id")) is int:
        return row["id"]
    return _get(row, "id", str, source)


def _numbers(row: dict[str, Any], name: str, where: str) -> Float[np.ndarray, " steps"] | None:
    values = _get(row, name, list, where, optional=True)
    if values is None:
        return None
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f'{where}: "{name}" holds {_kind(value)}, expected numbers')
        # An int may be too large for a float.
        if abs(value) > sys.float_info.max or value != value:
            raise UserError(f'{where}: "{name}" holds {value!r:.40}, expected finite numbers')
    return np.asarray(values, np.float64)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")
