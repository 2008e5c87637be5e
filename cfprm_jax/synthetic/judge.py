"""Exact labels of any solution of the arithmetic world, from its texts.

A solution that a model sampled comes as texts alone. A worked move is taken for the next one in line, a move that is
worked out "again" for the one of the problem that it names (or the last, if the problem has no such move): from there
the labels are those of :func:`~cfprm_jax.synthetic.world.labels`. A text that no step could be is negative and changes
nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from cfprm_jax.synthetic.world import DAYS, Problem, WorldStep, labels

_DAY = "|".join(DAYS)
_WORKED = re.compile(rf"(?P<before>{_DAY})(?P<sign>[+-])(?P<size>{_DAY})(?:=(?P<day>{_DAY})(?P<again> again)?)?")
_STATED = re.compile(rf"(?P<kind>so|answer|)=(?P<day>{_DAY})")
_KINDS = {"so": "restate", "answer": "answer", "": "get"}


class ExactJudgement(NamedTuple):
    """Labels and answer of a solution.

    Attributes:
      labels: 1 or 0 of each step.
      answer: the day that it ends with; None if its last step states no answer.
    """

    labels: tuple[int, ...]
    answer: int | None


def parse(text: str, problem: Problem, done: int) -> WorldStep | None:
    """Parses the text of a step that follows `done` worked moves; None if it is not a step."""
    if text == "so":
        return WorldStep("idle", 0)
    if match := _STATED.fullmatch(text):
        return WorldStep(_KINDS[match["kind"]], DAYS.index(match["day"]))
    match = _WORKED.fullmatch(text)
    if match is None:
        return None
    before, move = DAYS.index(match["before"]), int(f"{match['sign']}{DAYS.index(match['size'])}")
    if match["day"] is None:
        return WorldStep("take", 0, done, before, move)
    if match["again"] is None:
        return WorldStep("work", DAYS.index(match["day"]), done, before, move)
    index = problem.moves.index(move) if move in problem.moves else max(done - 1, 0)
    return WorldStep("again", DAYS.index(match["day"]), index, before, move)


def judge(problem: Problem, texts: Sequence[str]) -> ExactJudgement:
    """The exact labels and the answer of a solution."""
    steps: list[WorldStep | None] = []
    done = 0
    for text in texts:
        step = parse(text, problem, done)
        steps.append(step)
        if step is not None and step.index >= 0:
            done = step.index + 1
    known = iter(labels(problem, [step for step in steps if step is not None]))
    last = steps[-1] if steps else None
    return ExactJudgement(
        labels=tuple(0 if step is None else next(known) for step in steps),
        answer=last.day if last is not None and last.kind == "answer" else None,
    )


def true_step(problem: Problem, texts: Sequence[str]) -> str:
    """The correct next step after correct steps: the next move worked out, or the answer."""
    done, half = 0, False
    for text in texts:
        step = parse(text, problem, done)
        if step is not None and step.index >= 0:
            done, half = step.index + 1, step.kind == "take"
        elif step is not None and step.kind == "get":
            half = False
    days = problem.days
    if half:
        return WorldStep("get", days[done]).text
    if done == len(problem.moves):
        return WorldStep("answer", problem.answer).text
    return WorldStep("work", days[done + 1], done, days[done], problem.moves[done]).text


def parse_problem(question: str) -> Problem | None:
    """The problem of a question; None if it is not of this world."""
    match = re.fullmatch(rf"start=(?P<start>{_DAY})(?P<moves>(?:[+-](?:{_DAY}))+)", question)
    if match is None:
        return None
    moves = re.findall(rf"([+-])({_DAY})", match["moves"])
    return Problem(DAYS.index(match["start"]), tuple(int(f"{sign}{DAYS.index(size)}") for sign, size in moves))
