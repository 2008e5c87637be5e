"""ReST-MCTS* value rows: {"prompt_answer": "Problem: ...\\nSolution:\\nStep 1: ...\\nStep 2: ...", "label": value}.

Each row is a prefix of a solution with the value of its last step, a soft label in [0, 1]. The prefixes of one search
tree follow one another; here they become whole solutions again. Within a run of rows of one question, every row that
no other row continues is a trajectory; its steps take the values of the rows that are its prefixes, and steps without
a row of their own are unlabelled. A prefix that comes a second time begins a new run, because it belongs to another
search. In a shuffled file, where runs have one row, each row is a trajectory of which the last step is labelled.

Steps begin with "Step k:" at the start of a line and keep it; a solution without those is one step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.data.formats.grouping import Grouping
from cfprm_jax.errors import UserError

NAME = "rest_mcts"
FIELDS = ("prompt_answer", "label")

_PROMPT = re.compile(r"\s*Problem:(?P<question>.*?)\nSolution:(?P<solution>.*)", re.DOTALL)
_STEP = re.compile(r"^(?=Step \d+\s*:)", re.MULTILINE)


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in FIELDS)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The prefix that a row holds: labelled at its last step.

    Raises:
      UserError: no problem, no solution, or a value outside [0, 1].
    """
    del options  # Nothing here is a rating or an alternative.
    prompt = _PROMPT.fullmatch(fields.text(row, "prompt_answer"))
    if prompt is None:
        raise UserError("field 'prompt_answer': expected 'Problem: ...' and, on a line of its own, 'Solution:'")
    steps = [step.strip() for step in _STEP.split(prompt["solution"]) if step.strip()]
    if not steps:
        raise UserError("field 'prompt_answer': no step after 'Solution:'")
    value = fields.label(fields.require(row, "label"))
    return [Solution(prompt["question"].strip(), steps, [None] * (len(steps) - 1) + [value])]


class Prefixes(Grouping):
    """A run: rows of one question, no two of them equal, which become solutions when all are there."""

    def __init__(self) -> None:
        super().__init__()
        self._run: dict[tuple[str, ...], Solution] = {}

    def continues(self, row: Sequence[Solution]) -> bool:
        return super().continues(row) and tuple(row[0].steps) not in self._run

    def add(self, row: Sequence[Solution]) -> Sequence[Solution]:
        super().add(row)
        self._run.update({tuple(prefix.steps): prefix for prefix in row})
        return ()

    def finish(self) -> Sequence[Solution]:
        return combine(list(self._run.values()))


GROUPING = Prefixes


def combine(run: Sequence[Solution]) -> list[Solution]:
    """The trajectories of a run of prefixes of one question, no two equal, in the order of the rows that end them."""
    values: dict[tuple[str, ...], Label] = {tuple(row.steps): row.labels[-1] for row in run}
    inner = {steps[:length] for steps in values for length in range(1, len(steps))}
    return [
        Solution(run[0].question, steps, [values.get(steps[:length]) for length in range(1, len(steps) + 1)])
        for steps in values
        if steps not in inner
    ]
