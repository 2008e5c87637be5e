"""RLHFlow conversations: every step is a turn of the user, answered with + or - by the assistant.

A row is {"conversations": [{"role": "user", "content": step}, {"role": "assistant", "content": "+"}, ...]}.
The first turn holds the question, a space, and step 1. Turns may also be in ShareGPT's terms, {"from": "human" or
"gpt", "value": text}; a leading system turn is not read.

Where the question ends: at the first "Step 1:" (the Mistral corpus writes that). The DeepSeek corpus marks nothing.
There the question is taken to end with its first question mark, or without one with its first sentence, not counting
paragraphs that end in a blank line, which its steps never hold. That cut can be wrong, but no text and no label is
ever lost or moved: what is wrong is on which side of the cut a sentence stands.
"""

from __future__ import annotations

import re
from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.errors import UserError

NAME = "rlhflow"
FIELDS = ("conversations",)

_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}
_LABELS = {"+": 1.0, "-": 0.0}
_QUESTION_MARK = re.compile(r"\?[\"')\]$]*\s+")
_SENTENCE_END = re.compile(r"[.!][\"')\]$]*\s+")


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return "conversations" in row


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The one trajectory of a row.

    Raises:
      UserError: the turns do not alternate, an answer is not + or -, or the beginning of step 1 is not marked.
    """
    del options  # Nothing here is a rating or an alternative.
    turns = [_turn(turn, number) for number, turn in enumerate(fields.items(row, "conversations"), 1)]
    turns = turns[1:] if turns and turns[0][0] == "system" else turns
    steps: list[str] = []
    labels: list[Label] = []
    for number, (role, content) in enumerate(turns):
        expected = ("user", "assistant")[number % 2]
        if role != expected:
            raise UserError(f"field 'conversations': expected a turn of the {expected}, found one of the {role}")
        if role == "user":
            steps.append(content.strip())
        elif content.strip() in _LABELS:
            labels.append(_LABELS[content.strip()])
        else:
            raise UserError(f"field 'conversations': step {len(steps)}: expected + or -, found {content!r:.80}")
    if not steps or len(steps) != len(labels):
        raise UserError(f"row with {len(steps)} steps and {len(labels)} labels")
    question, steps[0] = _cut(steps[0])
    return [Solution(question, steps, labels)]


def _turn(turn: Any, number: int) -> tuple[str, str]:
    """Role and text of a turn."""
    if not isinstance(turn, dict):
        raise UserError(f"field 'conversations': turn {number}: expected an object, found {turn!r:.80}")
    role_field, text_field = ("from", "value") if "from" in turn else ("role", "content")
    role = fields.text(turn, role_field)
    if role not in _ROLES:
        raise UserError(f"field 'conversations': turn {number}: unknown role {role!r:.80}; known: {', '.join(_ROLES)}")
    return _ROLES[role], fields.text(turn, text_field)


def _cut(first: str) -> tuple[str, str]:
    """Question and step 1."""
    cut = fields.cut_question(first)
    if cut is not None:
        return cut
    start = max(first.rfind("\n\n"), 0)
    match = _QUESTION_MARK.search(first, start) or _SENTENCE_END.search(first, start)
    if match is None or match.end() == len(first):
        raise UserError("field 'conversations': the first turn has no mark between the question and step 1")
    return first[: match.end()].strip(), first[match.end() :]
