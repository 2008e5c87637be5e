"""Extraction, normalisation and grouping of answers."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.answers import extract, grade, groups, normalise
from cfprm_jax.evaluation.candidates import Candidate, Question


def question(answer, *candidates):
    return Question("q", "?", answer, candidates, "c.jsonl:4")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,000", "1000"),
        ("$12$", "12"),
        (r"\$5", "5"),
        ("Seven.", "seven"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}{2})"),
        (r"\bigl[0,1\bigr]", "[0, 1]"),
        ("12,345,678", "12345678"),
    ],
)
def test_notation_does_not_count(one, other):
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"), [("-5", "5"), ("1,00", "100"), ("(1,234,5)", "(12345)"), ("1/2", "0.5"), (r"\leftarrow", "arrow")]
)
def test_everything_else_does(one, other):
    assert normalise(one) != normalise(other)


@pytest.mark.parametrize(
    ("candidate", "answer"),
    [
        (Candidate(text=r"so \boxed{1} or \boxed{\frac{1}{2}}.", predicted="3"), "3"),
        (Candidate(text=r"so \boxed{1} or \boxed{\frac{1}{2}}."), r"\frac{1}{2}"),
        (Candidate(text="# Answer\n\n70"), "70"),
        (Candidate(steps=("a", "The answer is: 12 apples")), "12 apples"),
        (Candidate(steps=("so=five", "answer=two")), "two"),
        (Candidate(text="I give up"), None),
        (Candidate(text=r"\boxed{1"), None),
        (Candidate(text="answer:"), None),
        (Candidate(steps=()), None),
    ],
)
def test_extraction(candidate, answer):
    assert extract(candidate) == answer


def test_graders():
    asked = question(
        "1,000", Candidate(text="", predicted="$1000$", correct=False), Candidate(text="answer 7", correct=True)
    )
    np.testing.assert_array_equal(grade(asked, "none"), [False, True])
    np.testing.assert_array_equal(grade(asked, "exact"), [True, False])


def test_no_grader_needs_the_candidates_own_word():
    with pytest.raises(UserError, match=r'c\.jsonl:4: candidate 1 has no "correct"'):
        grade(question("1", Candidate(text="", correct=True), Candidate(text="1")), "none")


def test_groups_are_numbered_as_they_appear():
    answers = ["2", None, "1,000", "1000", " 2 "]
    np.testing.assert_array_equal(groups([Candidate(text="", predicted=a) for a in answers]), [0, -1, 1, 1, 0])
