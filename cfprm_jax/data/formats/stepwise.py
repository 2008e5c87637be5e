"""The stepwise format, as on the Hugging Face hub and as `prepare` writes it.

A row is {"prompt": text, "completions": [texts], "labels": [one a step]} with optional "id", "answer" and "source".
Labels are true, false, or numbers in [0, 1]; null and -100 are unlabelled. An optional "redundancy" has a number in
[0, 1] a step, 1 for one that is right but of no use, or null where that is not known. Optional "windows" are the sizes
of the windows that --granularities=given merges the steps into, such as [2, 1, 3]; they add up to the number of steps.
Rows of `label` have counts of rollouts (:mod:`cfprm_jax.data.estimates`): "successes" and "rollouts", one number a step
and null where a step was not rolled, and optional "correct", "remaining_steps", "context_steps",
"question_successes", "question_rollouts" and "question_remaining_steps". Another --estimate than "labels" derives the
labels from them.
"source" names the record that a
row comes from, so that solutions which share prefixes stay together; without it consecutive rows of one question are a
record.
`prepare` adds "granularity", the window size at which the row's steps were merged (an int, "whole" or "given"). Such a
row is a trajectory of the windows it holds, and a file may hold rows of several granularities one after another; rows
that are merged already are refused where they would be merged once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cfprm_jax.config import MOST_GRANULARITY, NAMED_GRANULARITIES, Granularity
from cfprm_jax.data import estimates
from cfprm_jax.data.estimates import RolloutCounts
from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.errors import UserError

NAME = "stepwise"
FIELDS = ("prompt", "completions", "labels")


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in FIELDS)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The one trajectory of a row; none where an estimate omits it.

    Raises:
      UserError: a field is missing or invalid.
    """
    steps = fields.texts(row, "completions")
    labels: Sequence[Label] = [fields.label(value) for value in fields.items(row, "labels")]
    if options.estimates.estimate != "labels":
        derived = estimates.labels(_counts(row, len(steps)), options.estimates)
        if isinstance(derived, str):
            options.leave_out(derived)
            return []
        labels = derived
    return [
        Solution(
            question=fields.text(row, "prompt"),
            steps=steps,
            labels=labels,
            id=fields.optional_text(row, "id"),
            answer=fields.optional_text(row, "answer"),
            source=fields.optional_text(row, "source"),
            granularity=_granularity(row.get("granularity")),
            redundancy=None
            if row.get("redundancy") is None
            else [fields.label(value) for value in fields.items(row, "redundancy")],
            windows=None if row.get("windows") is None else [_window(size) for size in fields.items(row, "windows")],
        )
    ]


def _counts(row: dict[str, Any], steps: int) -> RolloutCounts:
    """The counts of a row, checked."""
    missing = [name for name in ("successes", "rollouts") if row.get(name) is None]
    if missing:
        raise UserError(f"field {missing[0]!r}: missing, and --estimate derives labels from it")
    if _granularity(row.get("granularity")) != 1:
        raise UserError(f"field 'granularity': {row['granularity']!r}, and --estimate derives labels of single steps")
    correct = row.get("correct")
    if correct is not None and not isinstance(correct, bool):
        raise UserError(f"field 'correct': expected true, false or null, found {correct!r:.80}")
    return RolloutCounts(
        successes=_numbers(row, "successes", steps),
        rollouts=_numbers(row, "rollouts", steps),
        correct=correct,
        remaining=_numbers(row, "remaining_steps", steps) if row.get("remaining_steps") is not None else None,
        question=(_number(row, "question_successes"), _number(row, "question_rollouts")),
        question_remaining=_number(row, "question_remaining_steps"),
        context=_number(row, "context_steps") or 0,
    )


def _numbers(row: dict[str, Any], name: str, steps: int) -> tuple[int | None, ...]:
    values = fields.items(row, name)
    if len(values) != steps:
        raise UserError(f"field {name!r}: {len(values)} entries, and {steps} steps")
    return tuple(_count(value, name) for value in values)


def _number(row: dict[str, Any], name: str) -> int | None:
    return _count(row.get(name), name)


def _count(value: Any, name: str) -> int | None:
    """A whole number from 0, or null; a float that is whole (what pandas makes of a column with null) is one."""
    if value is None or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise UserError(f"field {name!r}: expected whole numbers from 0, or null; found {value!r:.80}")
    return int(value)


def _granularity(value: Any) -> Granularity:
    """1 where it is missing or null, as where tables of several columns were joined."""
    if value is None or (isinstance(value, float) and value != value):
        return 1
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value in NAMED_GRANULARITIES or (type(value) is int and 1 <= value <= MOST_GRANULARITY):
        return value
    raise UserError(
        f'"granularity" is {value!r:.80}, expected a whole number from 1 to {MOST_GRANULARITY}, or one of '
        f"{', '.join(NAMED_GRANULARITIES)}"
    )


def _window(value: Any) -> int:
    size = _count(value, "windows")
    if size is None:
        raise UserError("field 'windows': expected positive whole numbers; found null")
    return size
