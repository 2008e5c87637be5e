r"""The answer that a candidate gives, and what of an answer is only notation.

A candidate's answer is its "predicted". Without one it is looked for in the text, or the steps, in the ways that the
data sets publish, the first that is there:

1. what the last balanced \boxed{...} (or \fbox{...}) holds, as in MATH, with the boxes that an "and", an "or" or a
   comma joins to it ("\boxed{5} or \boxed{-5}");
2. the line after the last "# Answer", as in PRM800K;
3. the rest of the line after the last "####", as in GSM8K and GSM-Plus;
4. what the last statement of an answer gives ("The answer is 7.", "answer=7", "**Answer:** 7"), to the end of its
   sentence and without the clause that explains it (", which is even"); a sentence that only has the word "answer" in
   it gives none, and one that calls the answer right or wrong only where no other does;
5. for a data set whose name begins with "gsm", the last number;
6. the number that the last sentence ends in after "is", "are" or "=", with its unit ("The temperature is -3 degrees.").

Marks of Markdown around an answer (**7**, `7`), the signs of displayed formulas and a final full stop are no part of
it. An answer of which nothing is left is none, as an empty box. A candidate without an answer is wrong for every grader
that looks at answers, and takes no part in a vote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # this module is imported by every grading process, which needs no NumPy
    from cfprm_jax.data.candidates import Candidate

_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:(?P<brace>\{)|(?P<one>\\[a-zA-Z]+|[^\s\\{}$]))")
_JOINED = re.compile(r"[^.!?\n\\]{0,20}(?:\band\b|\bor\b|,|;)[^.!?\n\\]{0,20}", re.IGNORECASE)
_HEADING = re.compile(r"^#+ *Answer\b[ :]*", re.IGNORECASE | re.MULTILINE)
_HASHES = re.compile(r"####")
_VERB = r"(?:is|are|was|equals?|(?:would|should|must|will|can only) be|comes? (?:out )?to|becomes?)\b"
# Not the verb: "to answer this, we need to know how much is left", "she answers 15 of them".
_STATED = re.compile(
    rf"(?<!\bto )\banswers?\b(?:[^.!?\n:=]{{0,80}}?\b{_VERB}[\s:=*_`]*|[ *_`]*(?:\([^()\n]*\)[ *_`]*)?[:=][\s*_`]*)|"
    r"(?<!\bto )\banswer\b[ *_`]+(?=[-+$\\\d(\[])",
    re.IGNORECASE,
)
# What a sentence about the answer, rather than of it, goes on with: "to check that the answer is right".
_JUDGED = re.compile(
    r"(?:not |indeed |really |also )?(?:right|correct|wrong|incorrect|clear|reasonable|valid|verified|consistent|"
    r"confirmed|helpful|acceptable|sensible|plausible)\b",
    re.IGNORECASE,
)
_FILLING = re.compile(
    r"(?:[ *_`:=]*+(?:therefore|thus|hence|then|so|simply|just|exactly|approximately|about|roughly|clearly|indeed|"
    r"given by|equal to|the following|as follows)\b[\s,:]*+)*+[ *_`:=]*+",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(r"\s*(?:\$\$(?P<dollars>.+?)\$\$|\\\[(?P<brackets>.+?)\\\])", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<![0-9]\.)(?<!\b[ap]\.m)[.!?](?=[\s*_`\"')\]]*(?:\s|$))|\n")
# White space is taken whole, from its beginning: of every place in a long run of it, each way would be tried.
_CLAUSE = re.compile(
    r"(?:,|(?<!\s))\s++(?:because|since|so that|given that)\b.*|"
    r"[,;]\s*+(?:which|so|as|not|where|that|meaning|but|i\.e\.|e\.g\.|namely)\b.*|"
    r"(?<!\s)\s++--?\s++[a-zA-Z].*",
    re.IGNORECASE | re.DOTALL,
)
_MARKS = re.compile(r"\*\*|__|`+")
_CLOSING = re.compile(
    r"(?:\b(?:is|are|equals)\b|=)\s*"
    r"(?P<value>[-+\u2212]?\\?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
    r"(?:\s*+%(?: [a-zA-Z°/]++){0,2}|\s*+(?<= )[a-zA-Z°/]++(?: [a-zA-Z°/]++)?|\s*+))[.!]?\s*+$"
)
_BRACE = re.compile(r"[{}]")
# Statements of an answer that are looked at, from the end, until one does more than judge it. Each may be a whole line.
_MOST_STATEMENTS = 32
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
    """The final answer of a candidate, by the rules of the module's docstring; None if there is none."""
    if candidate.predicted is not None:
        return candidate.predicted if bare(candidate.predicted) else None
    text = candidate.text if candidate.text is not None else "\n".join(candidate.steps or ())
    if boxed := _boxed(text):
        return boxed
    for marker in (_HEADING, _HASHES):
        stated = [match.end() for match in marker.finditer(text)]
        if stated:
            return bare(text[stated[-1] :].strip().partition("\n")[0]) or None
    if stated_answer := _stated(text):
        return stated_answer
    if dataset is not None and dataset.lower().startswith("gsm"):
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else None
    closing = _CLOSING.search(text)
    return closing["value"].strip() if closing else None


def bare(answer: str) -> str:
    """An answer without marks of Markdown, signs of formulas around it, and final punctuation."""
    answer = _MARKS.sub("", answer).strip()
    while True:
        before = answer
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            inside = answer[len(opening) : -len(closing)]
            if answer.startswith(opening) and answer.endswith(closing) and closing not in inside:
                answer = inside.strip()
        if answer in ("$", "$$", "\\(", "\\[", "*", "_", "{}"):
            answer = ""
        if answer.endswith((".", "!", "?", ",", ";", ":")) and not answer.endswith(("..", "\\!", "\\,", "\\;", "\\:")):
            # A factorial ends in the sign too; only a sentence's is dropped, by _value.
            answer = answer if answer.endswith("!") else answer[:-1].strip()
        if answer == before:
            return answer


def _boxed(text: str) -> str | None:
    """What the last box holds, and those that are joined to it."""
    closed = _closed(text)
    joined: dict[str, None] = {}
    following = 0  # where the box after this one begins
    for match in reversed(list(_BOXED.finditer(text))):
        end = closed.get(match.end()) if match["brace"] else match.end()
        if end is None:
            continue
        inside = text[match.end() : end - 1] if match["brace"] else match["one"]
        if not bare(inside):
            continue
        if joined and (inside in joined or not _JOINED.fullmatch(text[end:following])):
            break
        joined[inside], following = None, match.start()
    return ", ".join(reversed(joined)) if joined else None


def _stated(text: str) -> str | None:
    """What the last statement of an answer gives that does not only judge it, else the last."""
    last = None
    for match in list(_STATED.finditer(text))[: -_MOST_STATEMENTS - 1 : -1]:
        if value := _value(text[match.end() :]):
            if not _JUDGED.match(value):
                return value
            last = last or value
    return last


def _value(rest: str) -> str | None:
    """The answer that a statement gives, from the text after its verb."""
    filling = _FILLING.match(rest)
    rest = rest[filling.end() :] if filling else rest
    if displayed := _DISPLAYED.match(rest):
        return bare(displayed["dollars"] or displayed["brackets"]) or None
    rest = rest.lstrip()
    end = _SENTENCE_END.search(rest)
    return bare(_CLAUSE.sub("", rest[: end.start()] if end else rest, count=1)) or None


def reference(answer: str) -> str:
    """The reference answer of a question; GSM8K publishes it at the end of a solution, after "####"."""
    return answer.rpartition("####")[2].strip()


def _closed(text: str) -> dict[int, int]:
    """The ends of all pairs of braces: from behind the opening one to behind the closing one."""
    closed, opened = dict[int, int](), list[int]()
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.end())
        elif opened:
            closed[opened.pop()] = match.end()
    return closed
