"""A solution's text cut into steps."""

from __future__ import annotations

import functools
import re

_BREAK = r"(?:\r\n|\r(?!\n)|\n)"
_BLANK = r"[^\S\r\n]*"


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


@functools.cache
def _line_breaks(count: int) -> re.Pattern[str]:
    return re.compile(f"{_BREAK}(?:{_BLANK}{_BREAK}){{{count - 1},}}")
