"""Files of questions for sampling, as test sets publish them.

    MATH500    {"problem", "solution", "answer", "subject", "level", "unique_id"}
    GSM-Plus   {"question", "solution", "answer", "perturbation_type", "seed_question", "seed_solution", "seed_answer"}
    GSM8K      {"question", "answer": a solution that ends in "#### " and the answer}
    any other  {"id"?, "question" (or "problem"), "answer", "dataset"?}

JSON lines, a JSON array or parquet, plain or .gz. The format is recognised row by row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.errors import UserError

_FINAL = "####"


@dataclasses.dataclass(frozen=True)
class QuestionRow:
    """One question.

    Attributes:
      id: the row's own, or its file and its number there.
      answer: the final answer alone.
      dataset: "math500", "gsm_plus", "gsm8k", or the row's own.
      source: "file:line".
      rest: the row's other fields, such as "subject" and "level".
    """

    id: str | int
    question: str
    answer: str
    dataset: str | None
    source: str
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The unique key of the question."""
        return f"{self.dataset or ''}\n{self.id}"


def read_question_files(paths: Paths) -> list[QuestionRow]:
    """Every question of the files, in their order.

    Raises:
      UserError: naming file, line and field of an invalid value; a question that occurs twice (the same id and data
        set); or a file that is missing, empty or damaged.
    """
    found: dict[str, QuestionRow] = {}
    for file in expand(paths):
        for number, row in enumerate(rows(file), 1):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            question = parse_row(row.data, source, f"{file.path.name.partition('.')[0]}/{number}")
            if question.name in found:
                raise UserError(f'{source}: "id" {question.id!r} was already that of {found[question.name].source}')
            found[question.name] = question
    return list(found.values())


def parse_row(row: dict[str, Any], source: str, place: str) -> QuestionRow:
    rest = dict(row)
    for of_candidates in ("candidates", "cost"):  # what a search writes is of its own candidates
        rest.pop(of_candidates, None)
    field = "question" if "question" in row else "problem"
    question, answer = rest.pop(field, None), rest.pop("answer", None)
    if not isinstance(question, str) or not question.strip():
        raise UserError(f'{source}: "{field}" is not a text with a question')
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise UserError(f'{source}: "answer" is not a text or a number')
    dataset = rest.pop("dataset", None)
    if dataset is None:
        dataset = _dataset(row, answer)
    elif not isinstance(dataset, str):
        raise UserError(f'{source}: "dataset" is not a text')
    if dataset == "gsm8k" and _FINAL in answer:
        rest["solution"] = answer
        answer = answer.rpartition(_FINAL)[2].strip()
    own = rest.pop("id", None)
    if own is None:
        own = rest.pop("unique_id", place)
    if isinstance(own, bool) or not isinstance(own, str | int):
        raise UserError(f'{source}: "id" is neither a text nor a whole number')
    return QuestionRow(own, question, answer, dataset, source, rest)


def _dataset(row: dict[str, Any], answer: str) -> str | None:
    """The published data set of a row."""
    if "perturbation_type" in row:
        return "gsm_plus"
    if "unique_id" in row and "problem" in row:
        return "math500"
    return "gsm8k" if _FINAL in answer else None
