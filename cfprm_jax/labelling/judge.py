"""A language model as judge: requests about labelled rows, its verdicts, and the rows on which it agrees.

A request numbers the steps of a solution as paragraphs from 0; the reply is the number of the first wrong one, or -1. A
row is kept only if judge and counts name the same first error, or both none (consensus filtering, arXiv 2501.07301).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.errors import UserError

_BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*(-?\d+)\s*\}")
_LONGEST = 9  # digits; no solution has as many steps, and int() refuses thousands of them
_PROMPT = """Below are a problem and a solution of it, which is cut into numbered paragraphs.

Problem:
{question}

Solution:
{paragraphs}

Check the paragraphs one after another. Stop at the first one that has an error. End your reply with the number of that
paragraph in \\boxed{{}}, or with \\boxed{{-1}} if no paragraph has an error."""

Verdict = int | None
"""Index of the first wrong step, or None for no error."""


def name(row: Mapping[str, Any]) -> str:
    """What a row's request is called; the judge's reply carries it."""
    return f"{row.get('source')}/{row.get('candidate', 0)}"


def check(row: dict[str, Any]) -> None:
    """UserError unless a row is a labelled one: a prompt, steps, and a label for each of them."""
    fields.text(row, "prompt")
    steps, labels = fields.texts(row, "completions"), _labels(row)
    if not steps:
        raise UserError("field 'completions': empty, expected at least one step")
    if len(labels) != len(steps):
        raise UserError(f"field 'labels': {len(labels)} entries, and {len(steps)} steps")
    for value in labels:
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"label {value:g} is not in [0, 1]")


def request(row: Mapping[str, Any], model: str, max_tokens: int) -> dict[str, Any]:
    """The request of a labelled row, in the batch form of OpenAI's chat completions."""
    paragraphs = "\n\n".join(
        f"<paragraph_{index}>\n{step}\n</paragraph_{index}>" for index, step in enumerate(row["completions"])
    )
    content = _PROMPT.format(question=row["prompt"], paragraphs=paragraphs)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    return {"custom_id": name(row), "method": "POST", "url": "/v1/chat/completions", "body": body}


def read_verdicts(paths: Paths) -> dict[str, Verdict | str]:
    """Verdicts by name of row; a text is the reason why there is none.

    Rows are results of a batch ({"custom_id", "response"}), or {"id", "candidate"?, "dataset"?, "first_error"} with the
    index of a step, or -1 or null for no error.

    Raises:
      UserError: a row that is neither, or two verdicts of one row.
    """
    found: dict[str, Verdict | str] = {}
    for file in expand(paths):
        for row in rows(file):
            where = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{where}: {row.reason}")
            key, verdict = _verdict(row.data, where)
            if key in found:
                raise UserError(f"{where}: a second verdict of {key!r:.80}")
            found[key] = verdict
    return found


def _verdict(row: dict[str, Any], where: str) -> tuple[str, Verdict | str]:
    if "first_error" in row and "id" in row:
        value = row["first_error"]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < -1):
            raise UserError(f'{where}: "first_error" is {value!r:.40}, expected the index of a step, -1 or null')
        dataset = f"{row['dataset']}/" if row.get("dataset") else ""
        return f"{dataset}{row['id']}/{row.get('candidate', 0)}", None if value in (None, -1) else value
    if not isinstance(row.get("custom_id"), str):
        raise UserError(
            f'{where}: expected the result of a request ("custom_id", "response"), or "id" and "first_error"'
        )
    try:
        choice = row["response"]["body"]["choices"][0]
        content = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return row["custom_id"], "no reply"
    if choice.get("finish_reason") == "length":  # a number in it need not be the last word
        return row["custom_id"], "a reply that was cut"
    numbers = _BOXED.findall(content) if isinstance(content, str) else []
    number = int(numbers[-1][: _LONGEST + 1]) if numbers else None
    if number is None or number < -1:
        return row["custom_id"], "no number in the reply"
    return row["custom_id"], None if number == -1 else number


@dataclasses.dataclass
class Consensus:
    """Counts of agreement.

    Attributes:
      kept, dropped: rows on which judge and counts agree, or do not.
      without: rows without a verdict, by reason; they are dropped too.
      confusion: (first error by the counts, by the judge) -> rows; -1 is no error.
    """

    kept: int = 0
    dropped: int = 0
    without: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    confusion: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)

    def filter(
        self, labelled: Iterator[dict[str, Any]], verdicts: Mapping[str, Verdict | str]
    ) -> Iterator[dict[str, Any]]:
        """The rows on which the judge agrees, in their order."""
        for row in labelled:
            verdict = verdicts.get(name(row), "no verdict")
            if not isinstance(verdict, str) and verdict is not None and verdict >= len(row["completions"]):
                verdict = "a number beyond the last step"
            if isinstance(verdict, str):
                self.without[verdict] += 1
                continue
            own = first_error(row)
            self.confusion[_place(own), _place(verdict)] += 1
            if own == verdict:
                self.kept += 1
                yield row
            else:
                self.dropped += 1

    def report(self) -> dict[str, Any]:
        """For label.json."""
        judged = self.kept + self.dropped
        return {
            "judged": judged,
            "kept": self.kept,
            "share_kept": self.kept / judged if judged else None,
            "without_verdict": dict(self.without),
            "confusion": [
                {"counts": own, "judge": judge, "rows": count} for (own, judge), count in sorted(self.confusion.items())
            ],
        }


def first_error(row: dict[str, Any]) -> Verdict:
    """Index of the first step with the label 0, or a number that is not above one half."""
    return next((index for index, label in enumerate(_labels(row)) if label is not None and label <= 0.5), None)


def _labels(row: dict[str, Any]) -> list[fields.Label]:
    return [fields.label(value) for value in fields.items(row, "labels")]


def _place(verdict: Verdict) -> int:
    return -1 if verdict is None else verdict
