"""What search wrote about the cost of a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cfprm_jax.errors import UserError

PARAMETERS = ("policy_parameters", "reward_parameters")
"""Numbers of parameters in a cost, which a row may lack."""

_TOKENS = ("policy_tokens", "reward_tokens", "sampled_tokens", "discarded_tokens")


@dataclasses.dataclass(frozen=True)
class QuestionCost:
    """The "cost" of a row of search.

    Attributes:
      policy_tokens, reward_tokens, sampled_tokens, discarded_tokens: see searching.methods.Cost.
      policy_parameters, reward_parameters: of the two networks; None where the row does not have them.
    """

    policy_tokens: int
    reward_tokens: int
    sampled_tokens: int
    discarded_tokens: int
    policy_parameters: int | None
    reward_parameters: int | None


def question_cost(row: Mapping[str, Any], source: str) -> QuestionCost | None:
    """The cost of a question's row; None where it has none, or one that is not of search.

    Args:
      source: file and line, for messages.

    Raises:
      UserError: a cost with a value that is not a count.
    """
    found = row.get("cost")
    if not isinstance(found, dict) or "policy_tokens" not in found:
        return None
    counts: dict[str, int | None] = {}
    for name in (*_TOKENS, *PARAMETERS):
        value = found.get(name)
        if value is None and name in PARAMETERS:
            counts[name] = None
        elif type(value) is not int or value < 0:
            raise UserError(f'{source}: "{name}" of "cost" is {value!r:.80}, expected a count')
        else:
            counts[name] = value
    return QuestionCost(**counts)  # type: ignore[arg-type]
