"""Problems, steps and their labels; the labels against a judge that reads only the texts."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.synthetic import judge as exact_judge
from cfprm_jax.synthetic.solver import Bias, Mistake, sample_bias, solve, work
from cfprm_jax.synthetic.world import MOVES, Problem, WorldConfig, WorldStep, distinct_problems, labels, sample_problem

WORDS = ["zero", "one", "two", "three", "four", "five", "six"]
PROBLEM = Problem(3, (2, -4))  # three, then five, then one


def judge(question, texts):
    """Labels read off the texts of a solution without misread moves. A move occurs once, so it identifies itself."""
    days = [WORDS.index(re.match(r"start=(\w+?)(?=[+-])", question)[1])]
    moves = re.findall(r"([+-])(\w+?)(?=[+-]|$)", question)
    for sign, size in moves:
        days.append((days[-1] + int(sign + str(WORDS.index(size)))) % 7)
    out, done = [], 0
    for text in texts:
        if match := re.fullmatch(r"so=(\w+)", text):
            out.append(days[done] == WORDS.index(match[1]))
        elif match := re.fullmatch(r"answer=(\w+)", text):
            out.append(done == len(moves) and days[-1] == WORDS.index(match[1]))
        else:
            before, sign, size, after = re.fullmatch(r"(\w+)([+-])(\w+)=(\w+?)(?: again)?", text).groups()
            place = moves.index((sign, size))
            done = place + 1
            out.append((days[place], days[done]) == (WORDS.index(before), WORDS.index(after)))
    return out


def test_texts():
    assert PROBLEM.question == "start=three+two-four"
    assert PROBLEM.days == (3, 5, 1) and PROBLEM.answer == 1
    steps = [
        WorldStep("work", 5, 0, 3, 2),
        WorldStep("again", 5, 0, 3, 2),
        WorldStep("restate", 5),
        WorldStep("answer", 1),
    ]
    assert [step.text for step in steps] == ["three+two=five", "three+two=five again", "so=five", "answer=one"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (
            [
                WorldStep("work", 5, 0, 3, 2),
                WorldStep("restate", 5),
                WorldStep("work", 1, 1, 5, -4),
                WorldStep("answer", 1),
            ],
            (1, 1, 1, 1),
        ),
        # Wrong result; what follows from it is wrong, though each step by itself adds up.
        (
            [
                WorldStep("work", 6, 0, 3, 2),
                WorldStep("restate", 6),
                WorldStep("work", 2, 1, 6, -4),
                WorldStep("answer", 2),
            ],
            (0, 0, 0, 0),
        ),
        # Going back to the mistake recovers.
        ([WorldStep("work", 6, 0, 3, 2), WorldStep("again", 5, 0, 3, 2), WorldStep("work", 1, 1, 5, -4)], (0, 1, 1)),
        # A misread move, a wrong day carried over, and two mistakes that cancel: the last day is true, its step is not.
        ([WorldStep("work", 4, 0, 3, 1)], (0,)),
        ([WorldStep("work", 5, 0, 3, 2), WorldStep("work", 2, 1, 6, -4)], (1, 0)),
        ([WorldStep("work", 6, 0, 3, 2), WorldStep("work", 1, 1, 6, -4), WorldStep("answer", 1)], (0, 0, 1)),
        # An answer before the last move; a restated day that is not where the solution stands.
        ([WorldStep("work", 5, 0, 3, 2), WorldStep("answer", 1)], (1, 0)),
        ([WorldStep("restate", 3), WorldStep("restate", 5)], (1, 0)),
    ],
)
def test_labels_by_hand(steps, expected):
    assert labels(PROBLEM, steps) == expected


def test_a_misread_move_that_leads_to_the_true_day_is_wrong_all_the_same():
    problem = Problem(3, (4, 1))  # -three is +four modulo seven
    assert labels(problem, [WorldStep("work", 0, 0, 3, -3), WorldStep("work", 1, 1, 0, 1), WorldStep("answer", 1)]) == (
        0,
        1,
        1,
    )


def test_going_back_is_to_the_first_mistake():
    config = WorldConfig(slip_rate=0, redundancy_rate=0, review_rate=0.3)
    rng = np.random.default_rng(0)
    problem, places = Problem(3, (2, -4, 1, 3)), set()
    for _ in range(200):
        steps = solve(problem, Bias(1, Mistake("result", 2), 1.0), config, rng).steps
        for place, step in enumerate(steps):
            if step.kind == "again":
                places.add(place)
                assert step.index == (1 if place > 1 else 0)
    assert places == {1, 2, 3, 4}


def test_labels_are_what_the_texts_say():
    config = WorldConfig(slip_rate=0.3, slips=("before", "result"), redundancy_rate=0.4, review_rate=0.4)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(400):
        problem = sample_problem(config, rng)
        solution = solve(problem, sample_bias(problem, config, rng), config, rng)
        assert judge(problem.question, solution.texts) == [bool(label) for label in solution.labels]
        seen |= {(step.kind, label) for step, label in zip(solution.steps, solution.labels, strict=True)}
    assert seen == {(kind, label) for kind in ("work", "again", "restate", "answer") for label in (0, 1)}


def test_problems_are_distinct_and_have_no_move_twice():
    config = WorldConfig()
    taken: set[Problem] = set()
    rng = np.random.default_rng(0)
    first, second = (distinct_problems(config, 300, rng, taken) for _ in range(2))
    assert len({problem.question for problem in first + second}) == 600 and len(taken) == 600
    for problem in first:
        assert 4 <= len(problem.moves) <= 5 and len(set(problem.moves)) == len(problem.moves)
        assert set(problem.moves) <= set(MOVES)


def test_long_problems_repeat_moves():
    """The judge of texts and the world's rule agree on them."""
    config = WorldConfig(
        min_moves=12, max_moves=14, repeat_moves=True, review_rate=0.0, slips=("before", "result"), split_rate=0.2
    )
    rng = np.random.default_rng(0)
    for problem in distinct_problems(config, 50, rng, set()):
        assert 12 <= len(problem.moves) <= 14 and len(set(problem.moves)) < len(problem.moves)
        solution = solve(problem, sample_bias(problem, config, rng), config, rng)
        assert exact_judge.judge(problem, solution.texts).labels == solution.labels
        assert exact_judge.parse_problem(problem.question) == problem


def test_more_problems_than_there_are():
    with pytest.raises(UserError, match="are too few"):
        distinct_problems(WorldConfig(min_moves=1, max_moves=1), 57, np.random.default_rng(0), set())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slip_rate": 1.5}, "slip_rate is 1.5, expected a probability"),
        ({"train_problems": 0}, "train_problems is 0, expected at least 1"),
        ({"min_moves": 6}, "6 to 5 moves"),
        ({"max_moves": 8}, "4 to 8 moves"),
        ({"min_bias": 0.99}, "min_bias 0.99 is above max_bias 0.95"),
        ({"slips": ("guess",)}, "expected some of before, move, result"),
        ({"biases": ()}, "biases is ()"),
        ({"repeat_moves": True}, "repeat_moves goes with a review_rate of 0"),
    ],
)
def test_impossible_worlds_are_refused(change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        dataclasses.replace(WorldConfig(), **change)


def test_each_mistake_damages_the_value_in_its_name():
    assert work(PROBLEM, 0, 3, None, "work") == WorldStep("work", 5, 0, 3, 2)
    assert work(PROBLEM, 0, 3, Mistake("before", 1), "work") == WorldStep("work", 6, 0, 4, 2)
    assert work(PROBLEM, 0, 3, Mistake("result", 1), "work") == WorldStep("work", 6, 0, 3, 2)
    for shift in range(1, 7):
        read = work(PROBLEM, 0, 3, Mistake("move", shift), "work")
        assert read.move not in PROBLEM.moves and read.before == 3 and read.day == (3 + read.move) % 7


def test_rates_of_zero_and_one():
    calm = WorldConfig(slip_rate=0, bias_rate=0, redundancy_rate=0, review_rate=0)
    rng = np.random.default_rng(0)
    solution = solve(PROBLEM, sample_bias(PROBLEM, calm, rng), calm, rng)
    assert solution.texts == ("three+two=five", "five-four=one", "answer=one") and solution.labels == (1, 1, 1)
    wordy = dataclasses.replace(calm, redundancy_rate=1.0)
    assert solve(PROBLEM, Bias(-1, Mistake("before", 1), 0.0), wordy, rng).texts == (
        "three+two=five",
        "so=five",
        "five-four=one",
        "so=one",
        "answer=one",
    )
    sure = Bias(1, Mistake("before", 1), 1.0)
    assert {solve(PROBLEM, sure, calm, rng).texts for _ in range(5)} == {
        ("three+two=five", "six-four=two", "answer=two")
    }
    looking = dataclasses.replace(calm, review_rate=1.0)
    assert solve(PROBLEM, Bias(0, Mistake("before", 1), 1.0), looking, rng).texts == (
        "four+two=six",
        "three+two=five again",
        "five-four=one",
        "answer=one",
    )
