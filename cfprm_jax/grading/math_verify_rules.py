r"""The default grader: math-verify (Hugging Face), with what it leaves to its callers.

math-verify reads both answers into sympy and compares them as mathematics: fractions with decimals (to six digits),
percentages with shares, sets in any order, tuples and intervals in order, matrices, equations; a unit after a number
does not count. Here words are compared as words (it would read "two" as t * w * o, and find "owt" equal), "None", which
GSM-Plus has for a question without an answer, is answered by saying so, and digits are cleaned of thin spaces, a final
full stop, and the words after them ("5 apples"; but not "5 million").

math-verify stops what takes too long by a signal, which works in a main thread only. Its timers are off here: these
functions may take without end, and are to be called in a process that can be killed.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from cfprm_jax.grading import characters, latex_math
from cfprm_jax.grading.answers import normalise

NO_ANSWER = "None"
"""The reference answer of a question that has none."""

_NO_ANSWER_WORDS = re.compile(
    r"none|n/?a|no answer|unknown|undetermined|not enough information|insufficient information|"
    r"(?:it )?(?:cannot|can not|can't) be (?:determined|answered|calculated|computed)(?: .*)?|"
    r"(?:it is )?(?:impossible|not possible) to (?:determine|answer|calculate|tell|know)(?: .*)?|"
    r"(?:there is )?(?:not enough|insufficient|missing) information(?: .*)?",
    re.IGNORECASE,
)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ ,.-]*")
# Fewer letters in a row may be a product of variables.
_WORD_LETTERS = re.compile(r"[A-Za-z]{4}")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|\{,\}| )+(?=\d{3}(?:\D|$))")
_NUMBER_AND_WORDS = re.compile(r"(\\?\$?\s*[-+]?[\d,]*\.?\d+)\s+([A-Za-z][A-Za-z ]*)")
_MIXED_NUMBER = re.compile(r"^([-+]?\d+) +(\d+)/(\d+)$")
_FACTORS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|percent|degrees?|and|or|to)\b", re.IGNORECASE
)


def equal(predicted: str, gold: str) -> bool:
    """Whether the predicted answer is right. May take without end: call it where it can be killed."""
    predicted, gold = characters.plain(predicted), characters.plain(gold)
    if normalise(_unwrapped(predicted)) == normalise(_unwrapped(gold)):
        return True
    if words(gold) == NO_ANSWER:
        return bool(_NO_ANSWER_WORDS.fullmatch(_unwrapped(predicted)))
    if words(gold) is not None or words(predicted) is not None:
        return _letters(predicted) == _letters(gold)
    wanted, given = _parsed(gold), _parsed(predicted)
    if wanted is None or given is None:
        return False
    from math_verify import verify

    # It warns once that its timers are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return bool(verify(wanted, given, timeout_seconds=None))


def words(answer: str) -> str | None:
    r"""An answer in words, without \text and the like; None for one that is mathematics."""
    inside = _unwrapped(answer)
    if not _WORDS.fullmatch(inside):
        return None
    return inside if _WORD_LETTERS.search(inside) or (inside != answer.strip() and len(inside) > 1) else None


def _unwrapped(answer: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", answer.replace("$", "")).strip().rstrip(".").strip()


def _letters(answer: str) -> str:
    """What is compared of words: letters and digits, in lower case."""
    return "".join(character for character in _unwrapped(answer).lower() if character.isalnum())


@functools.lru_cache(maxsize=4096)
def _parsed(answer: str) -> Any | None:
    """What is read in an answer. Kept, as an answer is compared with many."""
    return latex_math.parse(_cleaned(answer))


def _cleaned(answer: str) -> str:
    answer = _THIN_SPACE.sub("", answer.replace("−", "-").strip())
    if answer.endswith(".") and not answer.endswith(".."):
        answer = answer[:-1].strip()
    answer = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", answer)
    counted = _NUMBER_AND_WORDS.fullmatch(_TEXT_COMMAND.sub(r" \1", answer).strip())
    return counted[1] if counted and not _FACTORS.search(counted[2]) else answer
