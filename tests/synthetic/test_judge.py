"""The judge of texts agrees with the solver's own record of its steps, and accepts any text of a model."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.synthetic.judge import judge, parse_problem
from cfprm_jax.synthetic.solver import Bias, Mistake, sample_misconceptions, solve
from cfprm_jax.synthetic.world import Problem, WorldConfig, sample_problem

PROBLEM = Problem(3, (2, -4))  # three, then five, then one


def test_problems_are_read_back():
    rng = np.random.default_rng(0)
    config = WorldConfig(min_moves=1, max_moves=7)
    for _ in range(100):
        problem = sample_problem(config, rng)
        assert parse_problem(problem.question) == problem
    assert parse_problem("start=three") is None and parse_problem("start=eight+two") is None


def test_what_a_solver_writes_has_its_labels():
    config = WorldConfig(
        min_moves=3, max_moves=6, slip_rate=0.2, redundancy_rate=0.3, split_rate=0.4, idle_rate=0.3, review_rate=0.0
    )
    rng = np.random.default_rng(1)
    beliefs = sample_misconceptions(0.3, config, rng)
    kinds = set()
    for _ in range(300):
        problem = sample_problem(config, rng)
        solution = solve(problem, Bias(-1, Mistake("before", 1), 0.0), config, rng, beliefs)
        found = judge(problem, solution.texts)
        assert (found.labels, found.answer) == (solution.labels, solution.answer)
        kinds |= {(step.kind, label) for step, label in zip(solution.steps, solution.labels, strict=True)}
    assert kinds == {(kind, label) for kind in ("work", "take", "get", "restate", "idle", "answer") for label in (0, 1)}


@pytest.mark.parametrize(
    ("texts", "labels", "answer"),
    [
        (["three+two=five", "five-four=one", "answer=one"], (1, 1, 1), 1),
        (["three+two", "=five", "so", "so=five", "five-four=one", "answer=one"], (1, 1, 1, 1, 1, 1), 1),
        # The first half is right and the second is not; an idle step has the label before it.
        (["three+two", "=six", "so", "six-four=two", "answer=two"], (1, 0, 0, 0, 0), 2),
        (["so", "three+one=four", "so"], (1, 0, 0), None),
        # Going back to the move that the text names.
        (["three+two=six", "six-four=two", "three+two=five again", "five-four=one", "answer=one"], (0, 0, 1, 1, 1), 1),
        # Nothing that a step could be; a second half without a first; more moves than the problem has; no answer.
        (["three plus two", "three+two=five"], (0, 1), None),
        (["=five", "three+two=five"], (0, 1), None),
        (["three+two=five", "five-four=one", "one+one=two", "so=one", "answer=one"], (1, 1, 0, 0, 0), 1),
        (["answer=one"], (0,), 1),
        ([], (), None),
    ],
)
def test_by_hand(texts, labels, answer):
    assert judge(PROBLEM, texts) == (labels, answer)


def test_a_misconception_acts_wherever_its_day_and_move_meet():
    config = WorldConfig(slip_rate=0, redundancy_rate=0, review_rate=0)
    beliefs = {(3, 2): Bias(-1, Mistake("result", 1), 1.0)}
    nothing, rng = Bias(-1, Mistake("before", 1), 0.0), np.random.default_rng(0)
    assert solve(PROBLEM, nothing, config, rng, beliefs).texts == ("three+two=six", "six-four=two", "answer=two")
    assert solve(Problem(3, (-4, 2)), nothing, config, rng, beliefs).labels == (1, 1, 1)


def test_a_share_of_all_pairs_has_misconceptions():
    config = WorldConfig()
    beliefs = sample_misconceptions(0.25, config, np.random.default_rng(0))
    assert len(beliefs) == 14 and all(config.min_bias <= b.probability <= config.max_bias for b in beliefs.values())
    assert beliefs == sample_misconceptions(0.25, config, np.random.default_rng(0))
