r"""The answer that a candidate gives, and what of an answer is only notation.

A candidate's answer is its "predicted". Without one it is looked for in the text, or the steps, in the ways that the
data sets publish, the first that is there:

1. what the last balanced \boxed{...} (or \fbox{...}) holds, as in MATH;
2. the line after the last "# Answer", as in PRM800K;
3. the rest of the line after the last "####", as in GSM8K and GSM-Plus;
4. the rest of the line after the last "answer" ("The answer is 7.", "answer=7");
5. for a data set whose name begins with "gsm", the last number.

A candidate without an answer is wrong for every grader that looks at answers, and takes no part in a vote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module is imported by every grading process, which needs no NumPy
    from cfprm_jax.data.candidates import Candidate

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HEADING = re.compile(r"^#+ *Answer[ :]*", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####")
_ANSWER = re.compile(r"\banswer\b(?:\s+is\b)?[\s:=*]*", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_FRACTIONS = re.compile(r"\\[dt]frac(?![a-zA-Z])")


def normalise(answer: str) -> str:
    r"""What stays of an answer when what is only notation is taken away.

    Case, white space, dollar signs, a final full stop, commas between thousands, \left and \right and other sizes of
    brackets, and the difference between \dfrac, \tfrac and \frac.
    """
    answer = _FRACTIONS.sub(r"\\frac", _SIZES.sub("", answer))
    answer = answer.replace("\\$", "").replace("$", "")
    answer = "".join(answer.split()).lower()
    return _THOUSANDS.sub("", answer.rstrip("."))


def extract(candidate: Candidate, dataset: str | None = None) -> str | None:
    """The answer that a candidate gives, as the module's docstring says; None where there is none to be found."""
    if candidate.predicted is not None:
        return candidate.predicted
    text = candidate.text if candidate.text is not None else "\n".join(candidate.steps or ())
    for boxed in reversed(list(_BOXED.finditer(text))):
        inside = _until_closed(text[boxed.end() :])
        if inside is not None:
            return inside
    for marker in (_HEADING, _HASHES, _ANSWER):
        stated = [match.end() for match in marker.finditer(text)]
        if stated:
            return text[stated[-1] :].strip().partition("\n")[0].strip() or None
    if dataset is not None and dataset.lower().startswith("gsm"):
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else None
    return None


def reference(answer: str) -> str:
    """The reference answer of a question; GSM8K publishes it at the end of a solution, after "####"."""
    return answer.rpartition("####")[2].strip()


def _until_closed(text: str) -> str | None:
    """The text up to the brace that closes the one before it; None if there is no such brace."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return None
