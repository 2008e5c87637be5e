"""Questions and the solutions to label: candidates files, stepwise rows with an answer, or questions alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from cfprm_jax.data.candidates import Candidate, parse_question
from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.data.question_files import QuestionRow, parse_row
from cfprm_jax.data.steps import split_steps
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import digests


@dataclasses.dataclass(frozen=True)
class InputSolution:
    """One solution of a question.

    Attributes:
      number: its place among the question's.
      steps: at least one.
      correct: whether it reaches the answer; None where that is not known.
    """

    number: int
    steps: tuple[str, ...]
    correct: bool | None


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A question with the solutions to label.

    Attributes:
      candidates: every solution as it was read, those without a step among them.
      rate: (solutions that reach the answer, solutions with a verdict).
    """

    question: QuestionRow
    candidates: tuple[Candidate, ...]
    solutions: tuple[InputSolution, ...] = ()
    rate: tuple[int, int] = (0, 0)


Skip = Callable[[str], None]
"""Called with the error of a bad row: raises, or counts it."""


def read_solutions(paths: Paths, separator: str, skip: Skip) -> Iterator[Labelled]:
    """The questions of candidates files and of stepwise rows, in file order; correctness is that of the rows.

    Consecutive stepwise rows of one prompt are solutions of one question.

    Args:
      separator: between the steps of a candidate that has none.

    Raises:
      UserError: a file that is missing, empty or damaged, or a question that occurs twice.
    """
    seen: dict[str, str] = {}
    for question, candidates in _questions(paths, skip):
        if question.name in seen:
            raise UserError(f'{question.source}: "id" {question.id!r} was already that of {seen[question.name]}')
        seen[question.name] = question.source
        yield Labelled(question, candidates, tuple(_solutions(candidates, separator)))


def read_questions(paths: Paths, skip: Skip) -> Iterator[Labelled]:
    """The questions of files, without solutions: for a search tree, which makes its own."""
    seen: set[str] = set()
    for file in expand(paths):
        for number, row in enumerate(rows(file), 1):
            source = f"{file.name}:{row.line}"
            try:
                if row.data is None:
                    raise UserError(f"{source}: {row.reason}")
                question = parse_row(row.data, source, f"{file.path.name.partition('.')[0]}/{number}")
                _require_answer(question.answer, source)
            except UserError as error:
                skip(str(error))
                continue
            if question.name in seen:
                raise UserError(f'{source}: "id" {question.id!r} occurs twice')
            seen.add(question.name)
            yield Labelled(question, ())


def with_correctness(labelled: Labelled, verdicts: list[bool | None]) -> Labelled:
    """The question with what a grader found of each candidate."""
    known = [verdict for verdict in verdicts if verdict is not None]
    solutions = tuple(dataclasses.replace(one, correct=verdicts[one.number]) for one in labelled.solutions)
    return dataclasses.replace(labelled, solutions=solutions, rate=(sum(known), len(known)))


def _questions(paths: Paths, skip: Skip) -> Iterator[tuple[QuestionRow, tuple[Candidate, ...]]]:
    for is_stepwise, group in itertools.groupby(_rows(paths, skip), lambda pair: _group(pair[0])):
        if is_stepwise:
            found = _stepwise(list(group), skip)
            if found is not None:
                yield found
            continue
        yield from filter(None, itertools.starmap(functools.partial(_candidates, skip=skip), group))


def _rows(paths: Paths, skip: Skip) -> Iterator[tuple[dict[str, Any], str]]:
    for file in expand(paths):
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                skip(f"{source}: {row.reason}")
            else:
                yield row.data, source


def _group(row: dict[str, Any]) -> Any:
    """Rows of one value are a question, unless it is None."""
    return ("prompt", str(row["prompt"])) if "prompt" in row and "completions" in row else None


def _candidates(row: dict[str, Any], source: str, skip: Skip) -> tuple[QuestionRow, tuple[Candidate, ...]] | None:
    try:
        one = parse_question(row, source)
        _require_answer(one.answer, source)
    except UserError as error:
        skip(str(error))
        return None
    question = QuestionRow(one.id, one.question, one.answer, one.dataset, source)
    return question, one.candidates


def _require_answer(answer: str, source: str) -> None:
    if not answer.strip():
        raise UserError(f'{source}: "answer" is empty, and rollouts are compared with it')


def _stepwise(pairs: list[tuple[dict[str, Any], str]], skip: Skip) -> tuple[QuestionRow, tuple[Candidate, ...]] | None:
    """The question of rows of one prompt, without those that are malformed; None if all are.

    Name and answer are those of the first row. The others need no answer, but may not have another one.
    """
    question, found = None, []
    for row, source in pairs:
        try:
            candidate = _stepwise_candidate(row, source)
            question = question or _stepwise_question(row, source)
            answer = _answer(row)
            if answer and answer != question.answer:
                raise UserError(
                    f'{source}: "answer" is {answer!r:.40}, and {question.answer!r:.40} in {question.source}'
                )
        except UserError as error:
            skip(str(error))
        else:
            found.append(candidate)
    return None if question is None else (question, tuple(found))


def _stepwise_question(row: dict[str, Any], source: str) -> QuestionRow:
    prompt, answer = row["prompt"], _answer(row)
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f'{source}: "prompt" is not a question')
    if not answer:
        raise UserError(f'{source}: no "answer", and rollouts are compared with it')
    own, dataset = row.get("id"), row.get("dataset")
    if isinstance(own, bool) or not isinstance(own, str | int | None):
        raise UserError(f'{source}: "id" is {own!r:.40}, expected a text, a whole number or null')
    if not isinstance(dataset, str | None):
        raise UserError(f'{source}: "dataset" is {dataset!r:.40}, expected a text or null')
    name = digests.of_text(prompt)[:16] if own is None else own
    return QuestionRow(name, prompt, answer, dataset, source)


def _answer(row: dict[str, Any]) -> str:
    """The answer of a row; "" without one."""
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    return answer if isinstance(answer, str) and answer.strip() else ""


def _stepwise_candidate(row: dict[str, Any], source: str) -> Candidate:
    steps, correct = row["completions"], row.get("correct")
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps) or not steps:
        raise UserError(f'{source}: "completions" is not a list of steps')
    if correct is not None and not isinstance(correct, bool):
        raise UserError(f'{source}: "correct" is {correct!r:.40}, expected true, false or null')
    return Candidate(steps=tuple(steps), correct=correct)


def _solutions(candidates: tuple[Candidate, ...], separator: str) -> Iterator[InputSolution]:
    for number, candidate in enumerate(candidates):
        steps = candidate.steps if candidate.steps is not None else split_steps(candidate.text or "", separator)
        if steps:
            yield InputSolution(number, tuple(steps), candidate.correct)
