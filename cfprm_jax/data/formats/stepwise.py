"""The stepwise format, as on the Hugging Face hub and as `prepare` writes it.

A row is {"prompt": text, "completions": [texts], "labels": [one a step]} with optional "id", "answer" and "source".
Labels are true, false, or numbers in [0, 1]; null and -100 are unlabelled. An optional "redundancy" has a number in
[0, 1] a step, 1 for one that is right but of no use, or null where that is not known. "source" names the record that a
row comes from, so that solutions which share prefixes stay together; without it consecutive rows of one question are a
record.
`prepare` adds "granularity", the window size at which the row's steps were merged (an int, or "whole"). Such a row is a
trajectory of the windows it holds, and a file may hold rows of several granularities one after another; rows that are
merged already are refused where they would be merged once more.
"""

from __future__ import annotations

from typing import Any

from cfprm_jax.config import MOST_GRANULARITY, Granularity
from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import ParseOptions, Solution
from cfprm_jax.errors import UserError

NAME = "stepwise"
FIELDS = ("prompt", "completions", "labels")


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in FIELDS)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The one trajectory of a row.

    Raises:
      UserError: a field is missing or invalid.
    """
    del options  # Nothing here is a rating or an alternative.
    return [
        Solution(
            question=fields.text(row, "prompt"),
            steps=fields.texts(row, "completions"),
            labels=[fields.label(value) for value in fields.items(row, "labels")],
            id=fields.optional_text(row, "id"),
            answer=fields.optional_text(row, "answer"),
            source=fields.optional_text(row, "source"),
            granularity=_granularity(row.get("granularity", 1)),
            redundancy=None
            if row.get("redundancy") is None
            else [fields.label(value) for value in fields.items(row, "redundancy")],
        )
    ]


def _granularity(value: Any) -> Granularity:
    if value == "whole" or (type(value) is int and 1 <= value <= MOST_GRANULARITY):
        return value
    raise UserError(f'"granularity" is {value!r:.80}, expected a whole number from 1 to {MOST_GRANULARITY}, or "whole"')
