r"""Equality of questions: the normal form under which training questions are searched for in test sets.

Two questions are the same when their normal forms are equal. The normal form removes what publishers change without
changing the question, in this order:

1. Unicode NFKC (full-width letters, ligatures, non-breaking spaces, superscripts), then case folding.
2. Typographic quotes become ' and ", every dash and the minus sign become -.
3. Mathematics delimiters go: $, $$, \$, \( \) and \[ \].
4. LaTeX spacing goes: \, \; \: \! \> backslash-space, ~, \quad, \qquad, \thinspace, \left, \right, \displaystyle;
   \dfrac and \tfrac become \frac. The line break \\ stays, so that the comma of "\\," is not taken for part of "\,".
5. All white space goes.

What is left, digits, operators and punctuation among it, must agree to the letter.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from cfprm_jax.data.formats import files
from cfprm_jax.data.formats.files import Paths
from cfprm_jax.errors import UserError

NORMAL_FORM = "normal form 1"
"""Names the rules of :func:`normalise` where something is kept that depends on them; a change of them renames it."""

_FIELDS = ("problem", "question", "prompt")
_CHARACTERS = str.maketrans(
    {**dict.fromkeys("‘’‚‛′", "'"), **dict.fromkeys("“”„‟″", '"'), **dict.fromkeys("‐‑‒–—―−", "-")}
)
_LATEX = re.compile(
    r"(?P<keep>\\\\)"
    r"|\\?\$|\\[()\[\]]"
    r"|\\[,;:!> ~]|~"
    r"|\\(?:quad|qquad|thinspace|left|right|displaystyle)(?![a-z])"
    r"|(?P<fraction>\\[dt]frac)(?![a-z])"
    r"|\s+"
)


def normalise(question: str) -> str:
    """The normal form of a question, as this module's docstring defines it."""
    text = unicodedata.normalize("NFKC", question).casefold().translate(_CHARACTERS)
    return _LATEX.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    if match["keep"]:
        return match["keep"]
    return r"\frac" if match["fraction"] else ""


def read_questions(paths: Paths) -> frozenset[str]:
    """The normal forms of the questions in test sets.

    The files are JSON lines, a JSON array or parquet, plain or .gz, of rows with the question in "problem", "question"
    or "prompt"; a PRM800K record's "question" holds "problem" in turn.

    Raises:
      UserError: a file without rows, a malformed row, or a row without a question; with file and line.
    """
    found = set()
    for file in files.expand(paths):
        for row in files.rows(file):
            question = _question(row.data) if row.data is not None else None
            if question is None:
                reason = row.reason or f"no question in any of the fields {', '.join(_FIELDS)}"
                raise UserError(f"{file.name}:{row.line}: {reason}")
            found.add(normalise(question))
    return frozenset(found)


def _question(row: dict[str, Any]) -> str | None:
    for name in _FIELDS:
        value = row.get(name)
        value = value.get("problem") if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    return None
