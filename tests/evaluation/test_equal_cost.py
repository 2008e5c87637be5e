"""Search against Best-of-N at equal cost: expectations by enumeration, costs by hand."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from cfprm_jax import bon
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import equal_cost
from cfprm_jax.evaluation.costs import question_cost
from cfprm_jax.report import best_of_n


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_expected_best_is_the_mean_over_all_subsets(n):
    generator = np.random.default_rng(n)
    sizes = [5, 7]
    ranks = np.full((2, 7), -np.inf)
    correct = np.zeros((2, 7), bool)
    for place, size in enumerate(sizes):
        ranks[place, :size] = generator.integers(0, 3, size)  # with ties
        correct[place, :size] = generator.random(size) < 0.5
    present = np.arange(7) < np.array(sizes)[:, None]
    found = equal_cost.expected_best(ranks, correct, present, n)
    for place, size in enumerate(sizes):
        best = [max(subset, key=lambda i: (ranks[place, i], -i)) for subset in itertools.combinations(range(size), n)]
        assert found[place] == pytest.approx(correct[place][best].mean(), abs=1e-12)


def candidate(score: float, right: bool) -> dict:
    return {"text": "x", "steps": ["x"], "step_scores": [score], "correct": right}


def row(
    number: int, candidates: list[dict], policy: int, reward: int, sampled: int, discarded: int = 0, **more
) -> dict:
    tokens = {
        "policy_tokens": policy,
        "reward_tokens": reward,
        "sampled_tokens": sampled,
        "discarded_tokens": discarded,
    }
    return {"id": number, "question": "q", "answer": "1", "candidates": candidates, "cost": {**tokens, **more}}


SIZES = {"policy_parameters": 100, "reward_parameters": 10}
# Two FLOPs a parameter and token: 2 * (100 * 40 + 10 * 30) = 8,600, and 2 * (100 * 60 + 10 * 90) = 13,800.
SEARCHED = [
    row(0, [candidate(0.9, True), candidate(0.2, False)], 40, 30, 30, 10, **SIZES),
    row(1, [candidate(0.5, False)], 60, 90, 50, 20, **SIZES),
]
# Prompts of 10 tokens, 20 more a solution in each network: of n solutions 2 * (100 * (10 + 20 n) + 10 * 20 n).
SAMPLED = [
    row(0, [candidate(0.9, True), *[candidate(0.1, False)] * 3], 90, 80, 80, **SIZES),
    row(1, [candidate(0.9, True), candidate(0.8, True), *[candidate(0.1, False)] * 2], 90, 80, 80, **SIZES),
]


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def run(tmp_path, searched, sampled, **changes):
    """What bon finds; its files but the plot are in tmp_path."""
    config = bon.BonConfig(
        n=("1",), grader="none", aggregation=("min",), name="beam", name2="sampled", resamples=100, **changes
    )
    inputs = [[str(write(tmp_path / f"{i}.jsonl", rows))] for i, rows in enumerate((searched, sampled))]
    found = best_of_n.evaluate(best_of_n.read(inputs[0]), config, best_of_n.read(inputs[1]))
    best_of_n.write(found, tmp_path)
    return found.outcome


def test_n_is_the_largest_that_costs_no_more_and_the_table_is_the_first(tmp_path):
    """The search costs 11,200 a question; one solution 6,400, two 10,800, three 15,200."""
    (found,) = run(tmp_path, SEARCHED, SAMPLED[::-1])["equal_cost"]
    assert (found["n"], found["flops"], found["flops2"]) == (2, 11200.0, 10800.0)
    # Of the six pairs of question 0 three have its right solution, of question 1 five one of its two.
    assert (found["accuracy"], found["accuracy2"]) == (0.5, pytest.approx((3 / 6 + 5 / 6) / 2))
    assert found["difference"] == pytest.approx(0.5 - 8 / 12)
    assert found["ci95"][0] <= found["difference"] <= found["ci95"][1]
    for name in ("table.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert 0 < text.index("Accuracy at equal cost") < text.index("best of n, min")
        assert "beam: the best of all its solutions" in text and "here 96% of it" in text


def test_sizes_are_given_or_those_of_the_rows(tmp_path):
    unknown = [{**one, "cost": {**one["cost"], "reward_parameters": None}} for one in SAMPLED]
    with pytest.raises(UserError, match='--reward_parameters is required, because the "cost" of the rows has rows wi'):
        run(tmp_path, SEARCHED, unknown)
    (found,) = run(tmp_path, SEARCHED, unknown, reward_parameters=1e-8)["equal_cost"]
    assert (found["n"], found["flops2"]) == (2, pytest.approx(10800.0))
    larger = [{**one, "cost": {**one["cost"], "policy_parameters": 200}} for one in SAMPLED]
    with pytest.raises(UserError, match="different ones: 100, 200"):
        run(tmp_path, SEARCHED, larger)


def test_the_second_system_is_best_of_n(tmp_path):
    with pytest.raises(UserError, match="--input2 has discarded tokens in its costs, so it is a search"):
        run(tmp_path, SAMPLED, SEARCHED)


def test_rows_without_costs_are_compared_as_ever(tmp_path):
    plain = [{name: value for name, value in one.items() if name != "cost"} for one in SAMPLED]
    outcome = run(tmp_path, SAMPLED, plain)
    assert outcome["equal_cost"] == [] and outcome["comparison"]
    assert "equal cost" not in (tmp_path / "report.html").read_text().partition("<script")[0]


def test_costs_that_are_none_or_of_some_rows(tmp_path):
    assert question_cost({"cost": 0.25}, "f:1") is None and question_cost({}, "f:1") is None
    with pytest.raises(UserError, match='f:1: "sampled_tokens" of "cost" is -1, expected a count'):
        question_cost({"cost": {"policy_tokens": 1, "reward_tokens": 2, "sampled_tokens": -1}}, "f:1")
    some = write(tmp_path / "some.jsonl", [SAMPLED[0], {**SAMPLED[1], "cost": None}])
    both = write(tmp_path / "both.jsonl", SAMPLED)
    config = bon.BonConfig(n=("1",), grader="none", aggregation=("min",))
    with pytest.raises(UserError, match=r'some\.jsonl:2 has no "cost", and other rows have one'):
        best_of_n.evaluate(best_of_n.read([str(some)]), config, best_of_n.read([str(both)]))
