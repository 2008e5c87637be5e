"""Extraction of answers, and what of them is only notation."""

from __future__ import annotations

import pytest

from cfprm_jax.data.candidates import Candidate
from cfprm_jax.grading.answers import extract, normalise, reference


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
        (Candidate(text=r"so \boxed{1}. So \boxed{\frac{1}{2}}."), r"\frac{1}{2}"),
        (Candidate(text=r"so \boxed{1} or $y=\boxed{\frac{1}{2}}$."), r"1, \frac{1}{2}"),
        (Candidate(text=r"first \boxed{1}, and then much later on the same line \boxed{2}"), "2"),
        (Candidate(text=r"\boxed{1} and \boxed{1}"), "1"),
        (Candidate(text=r"So $\boxed7$."), "7"),
        (Candidate(text=r"\boxed \pi"), r"\pi"),
        (Candidate(text=r"\boxed{7} and again \boxed{}"), "7"),
        (Candidate(text=r"\boxed{}"), None),
        (Candidate(text=r"\boxed{ $ $ }"), None),
        (Candidate(text="", predicted=" "), None),
        (Candidate(text="The answer is 17. I hope this answer helps!"), "17"),
        (Candidate(text="So the answer is 17.\n\nTell me if you want another answer."), "17"),
        (Candidate(text="✅ Final Answer: **17**"), "17"),
        (Candidate(text="**Final Answer: 17**"), "17"),
        (Candidate(text="**Answer:** 17"), "17"),
        (Candidate(text="The answer (in metres) is 17."), "17"),
        (Candidate(text="The answer to the puzzle is 17."), "17"),
        (Candidate(text="The answer would be 17"), "17"),
        (Candidate(text="Thus the answer equals 17."), "17"),
        (Candidate(text="Our answer is therefore approximately 17.5."), "17.5"),
        (Candidate(text="The answers are 17 and 18."), "17 and 18"),
        (Candidate(text="The answer is\n$$\n17\n$$"), "17"),
        (Candidate(text="The answer is:\n\n\\[ x+1 \\]\nas wanted"), "x+1"),
        (Candidate(text="The answer is `17`."), "17"),
        (Candidate(text="The answer is 17!"), "17"),
        (Candidate(text="The answer is 17, which is odd."), "17"),
        (Candidate(text="The answer is 17 because of it."), "17"),
        (Candidate(text="The answer is 17, not 18"), "17"),
        (Candidate(text="The answer is $\\frac{1}{2}$."), r"\frac{1}{2}"),
        (Candidate(text="The answer is (B)."), "(B)"),
        (Candidate(text="The answer is 15. To check that the answer is right: 15/3 = 5."), "15"),
        (Candidate(text="The answer is 17. I hope the answer is clear!"), "17"),
        (Candidate(text="The answer is two. So the answer is not right."), "two"),
        (Candidate(text="The answer is wrong."), "wrong"),
        (Candidate(text="## Answering the question\nThe answer is 7."), "7"),
        (Candidate(text="The answers: 3 and 4"), "3 and 4"),
        (Candidate(text="My answer follows.\nThe speed is 17 km/h."), "17 km/h"),
        (Candidate(text="The height is −4 degrees."), "−4 degrees"),
        (Candidate(text="This is 7 too much to say more"), None),
        (Candidate(text=r"so \boxed{7}, and \boxed{8"), "7"),  # the last balanced one
        (Candidate(text=r"\fbox{7}"), "7"),
        (Candidate(text=r"\boxed{\text{(C)}} is the answer to it"), r"\text{(C)}"),
        (Candidate(text="# Answer\n\n70"), "70"),
        (Candidate(text="The answer is near.\n\n# Answer\n\n\\frac12\n"), r"\frac12"),
        (Candidate(text="5 + 4 = 9\n#### 9"), "9"),
        (Candidate(text="the answer, 5\n#### 1,009 \nand so on"), "1,009"),
        (Candidate(steps=("a", "The answer is: 12 apples")), "12 apples"),
        (Candidate(steps=("so=five", "answer=two")), "two"),
        (Candidate(text="I give up"), None),
        (Candidate(text=r"\boxed{1"), None),
        (Candidate(text="answer:"), None),
        (Candidate(steps=()), None),
        (Candidate(text="She has 5 or 7 left."), None),
    ],
)
def test_extraction(candidate, answer):
    assert extract(candidate) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She has 5 or 7 left.", "7"),
        ("It costs $1,234.50 a day", "$1,234.50"),
        ("That is -3/4.", "-3/4"),
        ("So 20%", "20%"),
        ("The answer is 5, not 7", "5"),
        ("To answer this question, we need to find how much is left. 10 - 3 = 7.", "7"),
        ("John answers 15 of them, leaving 20 - 15 = 5.", "5"),
        ("nothing", None),
    ],
)
def test_grade_school_questions_end_in_their_last_number(text, answer):
    assert extract(Candidate(text=text), "gsm8k") == answer
    assert extract(Candidate(text=text), "GSM-Plus") == answer


def test_the_reference_of_gsm8k_ends_its_solution():
    assert reference("9 * 2 = <<9*2=18>>18 a day.\n#### 18") == "18"
    assert reference(r"\frac{1}{2}") == r"\frac{1}{2}"


LONG = 50_000


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7" + " " * LONG + "because", "7"),
        ("The answer is 7," + " " * LONG + "which", "7"),
        ("The answer is 7" + " -" * LONG, "7" + " -" * LONG),
        (r"\boxed{" * LONG, None),
        (r"\boxed{" * LONG + "7" + "}" * LONG, "7"),
        (r"\boxed{7} or " * LONG, "7"),
        ("the answer is " * LONG + "7", "7"),
        ("The answer is " + "thus " * LONG + "7", "7"),
        ("It is 7" + " " * LONG + "!x", None),
        ("It is 7" + " " * LONG, "7"),
    ],
    ids=["clause", "comma", "dashes", "open", "nested", "joined", "statements", "filling", "closing", "closing's end"],
)
def test_a_long_text_takes_time_by_its_length(text, answer):
    """Some of these took minutes, by the square of their length: here they would not end."""
    assert extract(Candidate(text=text)) == answer


def test_the_statement_that_counts_is_looked_for_from_the_end():
    judged = "We check that the answer is right and that the answer is correct."
    assert extract(Candidate(text=f"The answer is 7. {judged}")) == "7"
    assert extract(Candidate(text=f"{judged} Is the answer clear? The answer is wrong.")) == "wrong"
    assert extract(Candidate(text=r"\boxed{1} or \boxed{2}, and \boxed{} or \boxed{3}")) == "3"
