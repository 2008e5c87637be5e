"""Checks of single fields, shared by the formats. A failure is a UserError; the reader adds file and line to it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cfprm_jax.config import EstimateConfig, Granularity
from cfprm_jax.errors import UserError

Label = float | None
"""A label as a format module gives it: None is unlabelled. Its range is checked by Trajectory."""

# Where the solution begins in the corpora that write question and solution into one text.
_FIRST_STEP = re.compile(r"\bStep 1\s*:")
_IGNORED = -100


class Solution(NamedTuple):
    """One labelled solution as a row gives it, before it is known which record it belongs to."""

    question: str
    steps: Sequence[str]
    labels: Sequence[Label]
    id: str | None = None
    answer: str | None = None
    source: str | None = None
    granularity: Granularity = 1
    redundancy: Sequence[Label] | None = None
    windows: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class ParseOptions:
    """Options for reading rows, and the counter of what the rules of a format leave out.

    Attributes:
      neutral: "positive", "negative" or "drop": what a rating of 0 counts as.
      alternatives: completions that were not chosen end trajectories of their own.
      estimates: how counts of rollouts become labels.
      leave_out: called with a reason each time a rule leaves out something that the row holds.
    """

    neutral: str = "positive"
    alternatives: bool = True
    estimates: EstimateConfig = dataclasses.field(default_factory=EstimateConfig)
    leave_out: Callable[[str], object] = lambda reason: None


def require(row: dict[str, Any], name: str) -> Any:
    """The value of a field that must be there."""
    if name not in row:
        raise UserError(f"missing field {name!r}; found: {', '.join(row) or 'none'}")
    return row[name]


def text(row: dict[str, Any], name: str) -> str:
    """A field that must be a string."""
    value = require(row, name)
    if not isinstance(value, str):
        raise UserError(f"field {name!r}: expected a string, found {value!r:.80}")
    return value


def texts(row: dict[str, Any], name: str) -> list[str]:
    """A field that must be a list of strings."""
    values = items(row, name)
    for number, value in enumerate(values, 1):
        if not isinstance(value, str):
            raise UserError(f"field {name!r}: entry {number}: expected a string, found {value!r:.80}")
    return values


def items(row: dict[str, Any], name: str) -> list[Any]:
    """A field that must be a list."""
    values = require(row, name)
    if not isinstance(values, list):
        raise UserError(f"field {name!r}: expected a list, found {values!r:.80}")
    return values


def mapping(row: dict[str, Any], name: str) -> dict[str, Any]:
    """A field that must be an object."""
    value = require(row, name)
    if not isinstance(value, dict):
        raise UserError(f"field {name!r}: expected an object, found {value!r:.80}")
    return value


def optional_text(row: dict[str, Any], name: str) -> str | None:
    """A field that may be missing or null; a number is taken as it is written."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"field {name!r}: expected a string, found {value!r:.80}")


def label(value: Any) -> Label:
    """A step label: true, false or a number; null, -100 and NaN (what pandas makes of null) are unlabelled."""
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        if value == _IGNORED or value != value:
            return None
        # An int may be too large for a float; its range is all that is wrong with it.
        if abs(value) > 1e9:
            return math.inf if value > 0 else -math.inf
        return float(value)
    raise UserError(f"label {value!r:.80} is not a number, true, false or null")


def rating(value: Any, neutral: str) -> Label:
    """A human rating as a label: -1 is 0, +1 is 1, 0 depends on `neutral`, null is unlabelled."""
    if value is None:
        return None
    if isinstance(value, bool) or value not in (-1, 0, 1):
        raise UserError(f"rating {value!r:.80} is not -1, 0, 1 or null")
    if value == 0:
        return {"positive": 1.0, "negative": 0.0, "drop": None}[neutral]
    return 1.0 if value == 1 else 0.0


def redundancy(value: Any) -> Label:
    """A human rating as a redundancy target: 0 (right, but of no use) is 1, +1 is 0, and -1 and null have none."""
    return {0: 1.0, 1: 0.0}.get(value) if value is not None else None


def cut_question(prompt: str) -> tuple[str, str] | None:
    """Question and solution of a text that holds both, at the first "Step 1:"; None where there is none."""
    match = _FIRST_STEP.search(prompt)
    if match is None:
        return None
    return prompt[: match.start()].strip(), prompt[match.start() :].strip()
