"""Math-Shepherd: {"input": text, "label": text, "task": text}.

"input" is the question and "Step 1: ... ки\\nStep 2: ... ки": every step ends with a tag of two Cyrillic letters.
"label" is the same text with + or - in place of each tag. The steps keep their "Step k:". A last piece of text after
which no tag comes is a step without a label.
"""

from __future__ import annotations

from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.errors import UserError

NAME = "math_shepherd"
FIELDS = ("input", "label")
TAG = "\u043a\u0438"


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return isinstance(row.get("input"), str) and isinstance(row.get("label"), str)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The one trajectory of a row.

    Raises:
      UserError: no step or no tag, or the two texts differ in more than the tags, so that a label could not be placed.
    """
    del options  # Nothing here is a rating or an alternative.
    tagged, rated = fields.text(row, "input"), fields.text(row, "label")
    *steps, rest = (piece.strip() for piece in tagged.split(TAG))
    if not steps:
        raise UserError(f"field 'input': no step ends with the tag {TAG!r} (Cyrillic)")
    labels: list[Label] = []
    position = 0
    for number, step in enumerate(steps, 1):
        position = _skip(rated, position, step, number)
        sign = rated[position : position + 1]
        if sign not in ("+", "-"):
            raise UserError(f"field 'label': after step {number}: expected + or -, found {sign!r}")
        labels.append(1.0 if sign == "+" else 0.0)
        position += 1
    if rated[_skip(rated, position, rest, len(steps) + 1) :]:
        raise UserError(f"row with {len(steps)} steps in 'input' and more text in 'label'")
    if rest:
        steps.append(rest)
        labels.append(None)
    cut = fields.cut_question(steps[0])
    if cut is None:
        raise UserError("field 'input': no 'Step 1:' after the question")
    return [Solution(cut[0], [cut[1], *steps[1:]], labels)]


def _skip(rated: str, position: int, step: str, number: int) -> int:
    """The position after the step's text and the white space around it."""
    position += len(rated[position:]) - len(rated[position:].lstrip())
    if not rated.startswith(step, position):
        raise UserError(f"step {number} of 'input' is not in 'label' where it should be")
    position += len(step)
    return position + len(rated[position:]) - len(rated[position:].lstrip())
