"""Which questions count as the same, and reading them from test sets."""

from __future__ import annotations

import json
import pathlib

import pytest

from cfprm_jax.data import read
from cfprm_jax.data.questions import normalise, read_questions
from cfprm_jax.errors import UserError


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $x + 1$?", "what is $x+1$ ?"),
        ("What is $x$?", "What is \\(x\\)?"),
        ("Find $$x.$$", "Find \\[x.\\]"),
        ("costs $\\$1.24$", "costs 1.24"),
        ("$a\\,b\\;c\\:d\\!e\\ f~g\\quad h$", "abcdefgh"),
        ("\\dfrac{1}{2} and \\tfrac 1 3", "\\frac{1}{2} and \\frac 1 3"),
        ("\\left( x \\right)", "(x)"),
        ("Janet’s “ducks”", 'Janet\'s "ducks"'),
        ("5 − 3 – 1", "5 - 3 - 1"),
        ("ｘ\u00a0+ 1", "x + 1"),
        ("Straße", "STRASSE"),
    ],
)
def test_the_same(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 1 + 1?", "What is 1 - 1?"),
        ("What is 12?", "What is 1.2?"),
        ("\\leftarrow x", "\\rightarrow x"),
        ("\\quadratic", "ratic"),
        ("find a", "find b"),
    ],
)
def test_not_the_same(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


def test_the_comma_after_a_line_break_is_no_space() -> None:
    assert normalise(r"1 & 2 \\, 3 \, 4") == r"1&2\\,34"


def test_normalising_twice_changes_nothing() -> None:
    once = normalise("Let  $\\dfrac{A}{B} = \\left[ 2 \\right]$. Find\\ $A$ “now”.")
    assert normalise(once) == once


def test_test_sets_in_their_forms(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"problem": "P"}\n{"question": "Q"}\n{"prompt": "R"}\n')
    (tmp_path / "b.json").write_text(
        json.dumps([{"id": "x", "problem": "S"}, {"question": {"problem": "T"}}], indent=1)
    )
    assert read_questions([tmp_path / "a.jsonl", tmp_path / "b.json"]) == {"p", "q", "r", "s", "t"}
    (tmp_path / "c.jsonl").write_text('{"problem": "P"}\n{"text": "Q"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl:2: no question in any of the fields problem, question, prompt"):
        read_questions(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text('{"problem": "P"}\n{"problem"\n')
    with pytest.raises(UserError, match=r"d\.jsonl:2: not JSON"):
        read_questions(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("path", "questions"),
    [
        ("math500/test.jsonl", 500),
        ("gsm8k/test.jsonl", 1319),
        ("gsm_plus/testmini.jsonl", None),
        ("process_bench/gsm8k.json", None),
        ("process_bench/math.json", None),
    ],
)
def test_the_published_test_sets(shared: pathlib.Path, path: str, questions: int | None) -> None:
    found = read_questions(shared / "data" / path)
    assert len(found) == questions if questions else len(found) > 100


def test_leakage_known_of_the_real_files(shared: pathlib.Path) -> None:
    data = shared / "data"
    test = read_questions(data / "math500/test.jsonl")
    inside = {normalise(trajectory.question) in test for trajectory in read(data / "prm800k/phase1_test.jsonl")}
    assert inside == {True}
    for name in ("phase1_train", "labelled_solutions"):
        training = {normalise(t.question) for t in read(data / f"prm800k/{name}.jsonl", alternatives=False)}
        assert not training & test
