"""The scores of cases with known wrong steps, as prm_bench writes and reads them.

JSON lines, one case a row: {"classification", "idx", "question", "steps", "step_scores", "step_redundancy"?,
"error_steps"}. "step_scores" is null for a case that could not be scored. A row belongs to the case of its
classification and idx, whose question and steps it must repeat to the letter: scores of another file are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.data.step_cases import Case
from cfprm_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class CaseScores:
    """The scores of one case.

    Attributes:
      validity: float64 [texts] in [0, 1], high where a step is right.
      redundancy: float64 [texts] in [0, 1], high where it is redundant; None where the model does not give it.
    """

    validity: Float[np.ndarray, " texts"]
    redundancy: Float[np.ndarray, " texts"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreTable:
    """The scores of all cases.

    Attributes:
      scores: by the case's key; what is missing or could not be scored is not in it.
      doubled: for every row whose case had a row already its source, and that of the first, which counts.
      unscored: number of cases whose row has null scores.
    """

    scores: Mapping[tuple[str, str], CaseScores]
    doubled: tuple[tuple[str, str], ...]
    unscored: int


def row_of(case: Case, scores: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a case, with the fields of scores ("step_scores", "step_redundancy", ...) in it."""
    return {
        "classification": case.classification,
        "idx": case.idx,
        "question": case.question,
        "steps": list(case.steps),
        **scores,
        "error_steps": list(case.error_steps),
    }


def read_scores(paths: Paths, cases: Sequence[Case]) -> ScoreTable:
    """The scores of files for the given cases.

    Raises:
      UserError: naming file, line and field: a row of no case or with another question or other steps, scores that are
        not one number in [0, 1] a step, or redundancy in some rows only.
    """
    by_key = {case.key: case for case in cases}
    found: dict[tuple[str, str], CaseScores] = {}
    seen: dict[tuple[str, str], str] = {}
    doubled, with_redundancy, without_redundancy = [], "", ""
    for file in expand(paths):
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            case = _case(row.data, by_key, source)
            if case.key in seen:
                doubled.append((source, seen[case.key]))
                continue
            seen[case.key] = source
            if "step_scores" not in row.data:
                raise UserError(f'{source}: no "step_scores"')
            validity = _numbers(row.data, "step_scores", len(case.steps), source)
            redundancy = _numbers(row.data, "step_redundancy", len(case.steps), source)
            if validity is None:
                continue
            found[case.key] = CaseScores(validity, redundancy)
            if redundancy is None:
                without_redundancy = without_redundancy or source
            else:
                with_redundancy = with_redundancy or source
    if with_redundancy and without_redundancy:
        raise UserError(f'{without_redundancy}: no "step_redundancy", but {with_redundancy} has it')
    return ScoreTable(found, tuple(doubled), len(seen) - len(found))


def _case(row: Mapping[str, Any], by_key: Mapping[tuple[str, str], Case], source: str) -> Case:
    """The case that a row belongs to."""
    name, idx = row.get("classification"), row.get("idx")
    if not isinstance(name, str) or not isinstance(idx, str):
        raise UserError(f'{source}: "classification" or "idx" is missing or not a string')
    key = (name, idx)
    if key not in by_key:
        raise UserError(
            f"{source}: case {key[1]!r:.80} of {key[0]!r:.80} is not among the {len(by_key):,} cases of --input"
        )
    case = by_key[key]
    for name, expected in (("question", case.question), ("steps", list(case.steps))):
        if row.get(name) != expected:
            raise UserError(f'{source}: "{name}" is another than that of {case.source}: scores of another file?')
    return case


def _numbers(row: Mapping[str, Any], name: str, count: int, source: str) -> Float[np.ndarray, " texts"] | None:
    values = row.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != count:
        raise UserError(f'{source}: "{name}" is not a list of {count} numbers, one a step')
    for value in values:
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise UserError(f'{source}: "{name}" holds {value!r:.40}, expected numbers in [0, 1]')
    return np.asarray(values, np.float64)
