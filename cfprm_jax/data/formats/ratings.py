"""Rows of rated solutions without alternatives: {"problem": text, "steps": [texts], "ratings": [-1, 0, 1 or null]}.

An optional "answer" is the reference answer and "id" the row's name; other fields are not read.
"""

from __future__ import annotations

from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import ParseOptions, Solution

NAME = "ratings"
FIELDS = ("problem", "steps", "ratings")


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in FIELDS)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The one trajectory of a row.

    Raises:
      UserError: a field is missing or invalid.
    """
    question, steps = fields.text(row, "problem"), fields.texts(row, "steps")
    ratings = fields.items(row, "ratings")
    return [
        Solution(
            question=question,
            steps=steps,
            labels=[fields.rating(value, options.neutral) for value in ratings],
            redundancy=[fields.redundancy(value) for value in ratings],
            id=fields.optional_text(row, "id"),
            answer=fields.optional_text(row, "answer"),
        )
    ]
