r"""The default grader: math-verify (Hugging Face), with what it leaves to its callers.

math-verify reads both answers into sympy and compares them as mathematics: fractions with decimals (to six digits),
percentages with shares, sets in any order, tuples and intervals in order, matrices, equations; a unit after a number
does not count. Here words are compared as words (it would read "two" as t * w * o, and find "owt" equal), "None", which
GSM-Plus has for a question without an answer, equals a statement that there is none, and digits are cleaned of thin
spaces, a final full stop, and the words after them ("5 apples"; but not "5 million").

math-verify stops what takes too long by a signal, which works in a main thread only. Its timers are off here: these
functions may take without end, and are to be called in a process that can be killed.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from cfprm_jax.grading import characters, latex_math, notation, numeric
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
_TIME = re.compile(r"(?P<hour>\d{1,2})(?::(?P<minute>\d\d))?[\s~\\]*(?P<half>[ap])\.?\s*m\.?", re.IGNORECASE)
_BASE = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?(?:\\text\{)?(?P<base>\d+)\}{0,2}")
_GOES_ON = re.compile(r"\s*(?:\\[lc]?dots[bcmio]?|\.\.\.|…|\\cdots)\s*")
_LIST_COMMA = re.compile(r",(?!\d{3}(?!\d))|\band\b|;|\\text\s*\{\s*and\s*\}")
_ASSIGNED = re.compile(r"(?P<name>[a-zA-Z])\s*=\s*(?P<value>[^=]+)")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|\{,\}| )+(?=\d{3}(?:\D|$))")
_APART = re.compile(r"(?<=\d)\s+(?=\d)(?!\d{3}(?!\d))")
_NUMBER_AND_WORDS = re.compile(r"(\\?\$?\s*[-+]?[\d,]*\.?\d+)\s+([A-Za-z][A-Za-z ]*)")
_MIXED_NUMBER = re.compile(r"^([-+]?\d+) +(\d+)/(\d+)$")
_FACTORS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|percent|degrees?|and|or|to)\b", re.IGNORECASE
)


def equal(predicted: str, gold: str) -> bool:
    """Whether the predicted answer is right. May take without end: call it where it can be killed."""
    predicted, gold = characters.plain(predicted), characters.plain(gold)
    if _form(_unwrapped(predicted)) == _form(_unwrapped(gold)):
        return bool(_form(_unwrapped(gold)))
    if words(gold) == NO_ANSWER:
        return bool(_NO_ANSWER_WORDS.fullmatch(_unwrapped(predicted)))
    times = [_TIME.fullmatch(_unwrapped(answer)) for answer in (predicted, gold)]
    if times[0] and times[1]:
        return _clock(times[0]) == _clock(times[1])
    (given, given_unit), (expected, expected_unit) = notation.cleaned(predicted), notation.cleaned(gold)
    if given_unit and expected_unit and not _one_unit(given_unit, expected_unit):
        return False
    if _form(given) == _form(expected):
        return bool(_form(expected))
    if not _form(given) or not _form(expected):
        return False
    if words(expected) is not None or words(given) is not None:
        return _letters(given) == _letters(expected)
    given, expected = _values_of_one_letter(given), _values_of_one_letter(expected)
    if verdict := _by_form(given, expected):
        return verdict == "equal"
    return _as_mathematics(given, expected)


def _form(answer: str) -> str:
    """The normal form of an answer, with a space between digits that separates no thousands: 3 1/2 is not 31/2."""
    return normalise(_APART.sub("_", answer))


def _one_unit(unit: str, other: str) -> bool:
    """Whether two units are one, or one of them is just "units" of the same power."""
    (base, power), (other_base, other_power) = (text.partition("^")[::2] for text in (unit, other))
    return power == other_power and (base == other_base or "unit" in (base, other_base))


def _by_form(given: str, expected: str) -> str | None:
    """The verdict where the form of two answers decides: bases, open-ended lists, sets beside tuples, named values."""
    bases = [_BASE.fullmatch(answer.replace(" ", "")) for answer in (given, expected)]
    if bases[1]:
        # Without its base a numeral is another number.
        same = bases[0] is not None and (bases[0]["digits"], bases[0]["base"]) == (bases[1]["digits"], bases[1]["base"])
        return "equal" if same else "different"
    if _GOES_ON.search(given) or _GOES_ON.search(expected):
        # Dots are not read, and what stands between them is no set.
        same = normalise(_GOES_ON.sub("…", given)) == normalise(_GOES_ON.sub("…", expected))
        return "equal" if same else "different"
    kinds = {_bracket(given), _bracket(expected)}
    if kinds == {"set", "tuple"}:
        return "different"
    named = [_named(answer) for answer in (given, expected)]
    for one, other, values in ((named[0], named[1], expected), (named[1], named[0], given)):
        if one is None or len(one) < 2:
            continue
        if other is not None:
            if set(one) != set(other):
                return "different"
            return "equal" if all(_as_mathematics(one[name], other[name]) for name in one) else "different"
        elements = _elements(values)
        if len(elements) == len(one):
            pairs = zip(one.values(), elements, strict=True)
            return "equal" if all(_as_mathematics(*pair) for pair in pairs) else "different"
    return None


def _as_mathematics(given: str, expected: str) -> bool:
    """What math-verify finds, unless the numbers are far apart beside their size."""
    if notation.is_interval(given) != notation.is_interval(expected):
        given, expected = notation.inequality(given) or given, notation.inequality(expected) or expected
    one, other = _parsed(expected), _parsed(given)
    if one is None or other is None:
        return _form(given) == _form(expected)
    import sympy
    from math_verify import verify

    if any(value.has(sympy.I) or _negative_root(value) for value in (one, other) if isinstance(value, sympy.Basic)):
        one, other = (_with_imaginary_unit(value) for value in (one, other))
    # It warns once that its timers are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return bool(verify(one, other, timeout_seconds=None)) and numeric.near(one, other)


def _negative_root(value: Any) -> bool:
    import sympy

    return any(part.base.is_negative and part.exp == sympy.S.Half for part in value.atoms(sympy.Pow))


def _with_imaginary_unit(value: Any) -> Any:
    """With i as the imaginary unit, which it is where a root of a negative number stands on the other side."""
    import sympy

    if not isinstance(value, sympy.Basic):
        return value
    return value.xreplace({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}).doit()


def _clock(found: re.Match[str]) -> tuple[int, int, str]:
    return int(found["hour"]), int(found["minute"] or 0), found["half"].lower()


def _bracket(answer: str) -> str | None:
    text = re.sub(r"\\left|\\right|\s", "", answer)
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set"
    return "tuple" if text.startswith("(") and text.endswith(")") and "," in text else None


def _elements(answer: str) -> list[str]:
    """What a list without nested brackets has between its commas."""
    text = re.sub(r"\\left|\\right", "", answer).strip()
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        text = text[1:-1]
    return [part.strip() for part in _LIST_COMMA.split(text)]


def _values_of_one_letter(answer: str) -> str:
    """3, 5 for "x=3, x=5"; other answers as they are."""
    parts = [_ASSIGNED.fullmatch(part.strip()) for part in re.split(_LIST_COMMA.pattern + r"|\bor\b", answer)]
    if len(parts) > 1 and all(parts) and len({part["name"] for part in parts if part}) == 1:
        return ", ".join(part["value"].strip() for part in parts if part)
    return answer


def _named(answer: str) -> dict[str, str] | None:
    """The values by their letters, of "a=2, b=1"; None for other answers, and for one letter with several values."""
    parts = [_ASSIGNED.fullmatch(part.strip()) for part in _LIST_COMMA.split(answer)]
    if not all(parts):
        return None
    # In the letters' order, as the bare list of an answer has them.
    named = {part["name"]: part["value"] for part in parts if part}
    return dict(sorted(named.items())) if len(named) == len(parts) else None


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
