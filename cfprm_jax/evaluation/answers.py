r"""Whether a candidate's answer is right, and which candidates give the same answer.

Two graders. "none" judges nothing: it takes each candidate's own "correct". "exact" compares the normalised texts of
the predicted and the reference answer, so that "$1,000.$" is "1000"; no mathematics is done, so 1/2 is not 0.5.

A candidate's answer is its "predicted"; without one, what the last \boxed{...} of its text or steps holds; or else the
rest of the line after the last "answer" ("The answer is 7.", "answer=7"), or the line after it ("# Answer", "7"). A
candidate without an answer is wrong for "exact", and takes no part in a vote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.candidates import Candidate, Question

GRADERS = ("none", "exact")

_BOXED = re.compile(r"\\boxed\s*\{")
_ANSWER = re.compile(r"\banswer\b(?:\s+is\b)?[\s:=*]*", re.IGNORECASE)
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


def extract(candidate: Candidate) -> str | None:
    """The answer that a candidate gives, as the module's docstring says; None where there is none to be found."""
    if candidate.predicted is not None:
        return candidate.predicted
    text = candidate.text if candidate.text is not None else "\n".join(candidate.steps or ())
    boxed = [match.end() for match in _BOXED.finditer(text)]
    if boxed:
        return _until_closed(text[boxed[-1] :])
    stated = [match.end() for match in _ANSWER.finditer(text)]
    if not stated:
        return None
    answer = text[stated[-1] :].strip().partition("\n")[0].strip()
    return answer or None


def _until_closed(text: str) -> str | None:
    """The text up to the brace that closes the one before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return None


def grade(question: Question, grader: str) -> Bool[np.ndarray, " candidates"]:
    """Which candidates of a question are right.

    Args:
      grader: "none" takes each candidate's "correct"; "exact" compares normalised answers.

    Raises:
      UserError: --grader=none and a candidate without "correct".
    """
    if grader == "exact":
        reference = normalise(question.answer)
        answers = [extract(candidate) for candidate in question.candidates]
        return np.array([answer is not None and normalise(answer) == reference for answer in answers])
    for number, candidate in enumerate(question.candidates):
        if candidate.correct is None:
            raise UserError(
                f'{question.source}: candidate {number} has no "correct", which --grader=none takes; '
                "--grader=exact compares the answers"
            )
    return np.array([bool(candidate.correct) for candidate in question.candidates])


def groups(candidates: Sequence[Candidate]) -> Int[np.ndarray, " candidates"]:
    """The group of each candidate among those that give the same normalised answer, numbered from 0 as they appear.

    A candidate without an answer has -1: it votes for nothing.
    """
    numbers: dict[str, int] = {}
    out = []
    for candidate in candidates:
        answer = extract(candidate)
        out.append(-1 if answer is None else numbers.setdefault(normalise(answer), len(numbers)))
    return np.array(out, np.int64)
