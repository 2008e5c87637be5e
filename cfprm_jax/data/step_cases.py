"""Solutions with known wrong steps, as PRMBench and ReasonEval publish them.

    PRMBench    {"classification", "idx", "question", "original_question", "modified_question", "original_process",
                 "modified_process", "error_steps": 1-based, ...}: the question and the process that count are the
                 modified ones, and the wrong steps are exactly the error_steps. The copy on the Hub joins
                 classification and idx. Each row of the class "redundency" (spelt as published) also gives a control:
                 its original question and process, of the class "correct", in which no step is wrong.
    ReasonEval  {"id", "question", "model_output_step_format": steps as lists of pieces (or "model_output_steps": steps
                 as texts), and either "rating": 1 or 0 (redundant) a step, or "model_output_solution_correctness":
                 "correct" or "wrong" and "model_output_solution_first_error_step": 1-based, ...}

JSON lines, a JSON array or parquet, plain or .gz; the format is recognised row by row. A case is named by its class and
its idx; of two with the same name the first counts, as in PRMBench's own program, and the others are counted.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Literal

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.data.questions import normalise
from cfprm_jax.errors import UserError

PUBLISHED = {
    "redundency": 758,
    "circular": 758,
    "counterfactual": 757,
    "step_contradiction": 758,
    "domain_inconsistency": 757,
    "confidence": 757,
    "missing_condition": 756,
    "deception": 750,
    "multi_solutions": 160,
}
"""PRMBench's classes, and how many cases each has in the publication."""

CONTROL = "correct"
"""The class of PRMBench's controls."""

_CONTROLLED = "redundency"

Kind = Literal["prm_bench", "redundant", "invalid"]
"""Benchmarks of cases: PRMBench, and ReasonEval's files of redundant and of invalid steps."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One solution.

    Attributes:
      kind: what it belongs to.
      classification: its class in PRMBench; of ReasonEval the name of its file.
      idx: its name there, without the class.
      question: what is solved.
      steps: texts that get a score each.
      error_steps: the wrong steps, from 1, in ascending order.
      beyond: error_steps of the row that are larger than the number of its steps. They have no effect, as in PRMBench's
        own program; 100 of the published rows have such.
      group: what the question was made of, in its normal form; cases that share it are no independent draws.
      forms: the normal forms under which the question may be found in a training corpus.
      source: file and line.
      file: name of the file.
      pieces: how many of the texts each step has; empty is one each.
      judged: steps that are known to be right or wrong, from the first on; those after an error are not.
      right_answer: whether the solution is known to reach the right answer.
    """

    kind: Kind
    classification: str
    idx: str
    question: str
    steps: tuple[str, ...]
    error_steps: tuple[int, ...]
    group: str
    forms: frozenset[str]
    source: str
    file: str
    judged: int
    beyond: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()
    right_answer: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The unique key of the case."""
        return self.classification, self.idx


@dataclasses.dataclass(frozen=True)
class Cases:
    """All cases of some files.

    Attributes:
      cases: in the order of the files; a control comes before the case that it belongs to.
      doubled: for every row that repeats a case, its source and that of the first.
    """

    cases: tuple[Case, ...]
    doubled: tuple[tuple[str, str], ...]


def read_cases(paths: Paths) -> Cases:
    """The cases of PRMBench's and ReasonEval's files.

    Raises:
      UserError: naming file, line and field of a value that this module's format excludes, such as an unknown class
        or an error_steps entry that is no whole number from 1 on; or a file that is missing, empty or damaged.
    """
    found: dict[tuple[str, str], Case] = {}
    doubled = []
    for file in expand(paths):
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            try:
                cases = _parse(row.data, source, file.name)
            except UserError as error:
                raise UserError(f"{source}: {error}") from None
            for case in cases:
                first = found.setdefault(case.key, case)
                if first is not case and case.classification != CONTROL:
                    doubled.append((source, first.source))
    return Cases(tuple(found.values()), tuple(doubled))


def _parse(row: dict[str, Any], source: str, file: str) -> list[Case]:
    if "modified_process" in row:
        return _prm_bench(row, source, file)
    if "model_output_step_format" in row or "model_output_steps" in row:
        return [_reason_eval(row, source, file)]
    raise UserError(
        'neither a row of PRMBench ("modified_process", ...) nor one of ReasonEval ("model_output_step_format", ...); '
        f"found: {', '.join(row) or 'none'}"
    )


def _prm_bench(row: dict[str, Any], source: str, file: str) -> list[Case]:
    classification = fields.text(row, "classification")
    if classification not in PUBLISHED:
        raise UserError(f'"classification" {classification!r:.80} is not among: {", ".join(PUBLISHED)}')
    idx = fields.text(row, "idx").removeprefix(f"{classification}_")
    question, steps = fields.text(row, "modified_question"), _steps(row, "modified_process")
    # "question" is PRM800K's own text, which the original_question of a row may paraphrase.
    texts = [row.get(name) for name in ("question", "original_question")] + [question]
    forms = [normalise(text) for text in texts if isinstance(text, str)]
    named = fields.items(row, "error_steps")
    for value in named:
        if type(value) is not int or value < 1:
            raise UserError(f'"error_steps" holds {value!r:.40}, expected numbers of steps, from 1 to {len(steps)}')

    def case(classification: str, question: str, steps: tuple[str, ...], named: list[int]) -> Case:
        return Case(
            kind="prm_bench",
            classification=classification,
            idx=idx,
            question=question,
            steps=steps,
            error_steps=tuple(sorted({step for step in named if step <= len(steps)})),
            beyond=tuple(sorted({step for step in named if step > len(steps)})),
            group=forms[0],
            forms=frozenset(forms),
            source=source,
            file=file,
            judged=len(steps),
        )

    cases = [case(classification, question, steps, named)]
    if classification == _CONTROLLED and "original_process" in row:
        cases.insert(0, case(CONTROL, fields.text(row, "original_question"), _steps(row, "original_process"), []))
    return cases


def _steps(row: dict[str, Any], name: str) -> tuple[str, ...]:
    steps = fields.texts(row, name)
    if not steps:
        raise UserError(f'"{name}" is empty, expected at least one step')
    return tuple(steps)


def _reason_eval(row: dict[str, Any], source: str, file: str) -> Case:
    pieces = _pieces(row)
    name = "id" if "id" in row else "uuid"
    idx = row.get(name)
    if isinstance(idx, bool) or not isinstance(idx, str | int):
        raise UserError(f'"{name}" is {idx!r:.40}, expected a text or a whole number')
    question = fields.text(row, "question")
    if "rating" in row:
        kind: Kind = "redundant"
        ratings = fields.items(row, "rating")
        if len(ratings) != len(pieces):
            raise UserError(f'"rating" has {len(ratings)} entries for {len(pieces)} steps')
        if any(type(value) is not int or value not in (0, 1) for value in ratings):
            raise UserError('"rating" holds something else than 1 and 0')
        wrong, judged = [step for step, value in enumerate(ratings, 1) if value == 0], len(pieces)
    else:
        kind = "invalid"
        verdict = fields.text(row, "model_output_solution_correctness")
        if verdict not in ("correct", "wrong"):
            raise UserError(f'"model_output_solution_correctness" is {verdict!r:.40}, expected "correct" or "wrong"')
        wrong, judged = [], len(pieces)
        if verdict == "wrong":
            first = fields.require(row, "model_output_solution_first_error_step")
            step = int(first) if isinstance(first, str) and first.isascii() and first.isdigit() else first
            if type(step) is not int or not 1 <= step <= len(pieces):
                raise UserError(
                    f'"model_output_solution_first_error_step" is {first!r:.40}, expected the number of one of '
                    f"{len(pieces)} steps, from 1"
                )
            wrong, judged = [step], step
    form = normalise(question)
    return Case(
        kind=kind,
        classification=pathlib.PurePath(file).name.partition(".")[0],
        idx=str(idx),
        question=question,
        steps=tuple(text for step in pieces for text in step),
        error_steps=tuple(wrong),
        group=form,
        forms=frozenset({form}),
        source=source,
        file=file,
        judged=judged,
        pieces=tuple(map(len, pieces)),
        right_answer=row.get("model_output_answer_correctness") == "correct",
    )


def _pieces(row: dict[str, Any]) -> list[list[str]]:
    """The steps, each a list of the texts that it consists of."""
    if "model_output_step_format" not in row:
        return [[step] for step in _steps(row, "model_output_steps")]
    pieces = fields.items(row, "model_output_step_format")
    if not pieces or not all(
        isinstance(step, list) and step and all(isinstance(text, str) for text in step) for step in pieces
    ):
        raise UserError('"model_output_step_format" is not a list of lists of strings, none of them empty')
    return pieces
