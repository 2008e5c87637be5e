"""A solution's text cut into steps, and counts of texts that the separator does not cut."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Sized

_BREAK = r"(?:\r\n|\r(?!\n)|\n)"
_BLANK = r"[^\S\r\n]*"
_LINE_BREAK = re.compile(r"[\r\n]")


def split_steps(text: str, separator: str) -> list[str]:
    r"""The steps of a text: what stands between separators, without pieces that have no visible character.

    A separator of n line breaks ("\n\n": a blank line) is any run of at least n of them, whichever way lines end ("\n",
    "\r\n", "\r") and whatever white space the lines between them hold: "a\n  \nb" and "a\r\n\r\nb" are two steps. Any
    other separator is taken literally.
    """
    if separator and not separator.strip("\n"):
        pieces = _line_breaks(len(separator)).split(text)
    else:
        pieces = text.split(separator)
    return [piece for piece in pieces if piece.strip()]


def is_unsplit(text: str, steps: Sized) -> bool:
    """Whether a text of several lines has one step: a sign of another separator than that of the PRM."""
    return len(steps) == 1 and _LINE_BREAK.search(text.strip()) is not None


@dataclasses.dataclass
class SplitCounts:
    """Counts of solutions given as texts, without steps.

    Attributes:
      texts: all of them.
      unsplit: those of one step although they contain line breaks.
    """

    texts: int = 0
    unsplit: int = 0

    def add(self, text: str, steps: Sized) -> None:
        """Counts a text and its steps, or its step scores."""
        self.texts += 1
        self.unsplit += is_unsplit(text, steps)

    def warning(self, separator: str) -> str | None:
        """A line about the texts that are one step; None without any."""
        if not self.unsplit:
            return None
        return (
            f"one step    {self.unsplit:,} of {self.texts:,} texts are one step although they contain line breaks: the "
            f'separator is {json.dumps(separator, ensure_ascii=False)}; for others give "steps" (docs/candidates.md)'
        )


@functools.cache
def _line_breaks(count: int) -> re.Pattern[str]:
    return re.compile(f"{_BREAK}(?:{_BLANK}{_BREAK}){{{count - 1},}}")
