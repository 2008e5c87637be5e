"""Labels from counts: one solution of seven steps by hand, every estimate, and what is refused."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax import flags, prepare
from cfprm_jax.config import EstimateConfig
from cfprm_jax.data import read
from cfprm_jax.data.estimates import RolloutCounts, labels
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.errors import UserError

X = None
# The fifth step is wrong; the sixth was not rolled; the last one is the solution's own end.
SEVEN = RolloutCounts(
    successes=(8, 6, 5, 2, 0, X, 0),
    rollouts=(8, 8, 8, 8, 8, X, 1),
    correct=False,
    remaining=(6, 5, 4, 3, X, X, X),
    question=(4, 8),
    question_remaining=7,
)
ROW = {
    "prompt": "q", "completions": list("abcdefg"), "labels": [1, 1, 1, 1, 0, X, X], "correct": False,
    "successes": [8, 6, 5, 2, 0, X, 0], "rollouts": [8, 8, 8, 8, 8, X, 1], "remaining_steps": [6, 5, 4, 3, X, X, X],
    "question_successes": 4, "question_rollouts": 8, "question_remaining_steps": 7, "answer": "14", "policy": "p",
}  # fmt: skip


def entropy(p: float, eta: float = 1.0) -> float:
    return math.log(1 - p + p * math.exp(eta)) / eta


@pytest.mark.parametrize(
    ("estimate", "until_error", "own_after"),
    [
        ("hard", [1, 1, 1, 1, 0], [X, 0]),
        ("soft", [1, 0.75, 0.625, 0.25, 0], [X, 0]),
        # Ratios to the step before: 1 / 0.5, 0.75, 0.833, 0.4.
        ("relative", [1, 0, 1, 0, 0], [X, 0]),
        ("entropy", [1, entropy(0.75), entropy(0.625), entropy(0.25), 0], [X, 0]),
        # Rates over the question's 0.5: 0.625 / 0.5 is cut to 1.
        ("self_denoised", [1, 1, 1, 0.5, 0], [X, 0]),
        # A seventh a step; then 4/7 - (3/7) / (3 + 1).
        ("value", [1 / 7, 2 / 7, 3 / 7, 4 / 7, 13 / 28], [X, X]),
    ],
)
def test_seven_steps_by_hand(estimate, until_error, own_after) -> None:
    for after, rest in (("null", [X, X]), ("negative", [0, 0]), ("keep", own_after)):
        found = labels(SEVEN, EstimateConfig(estimate=estimate, after_first_error=after))
        expected = [*until_error, *rest]
        assert [label is None for label in found] == [label is None for label in expected], after
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-12)


def test_each_option_of_the_estimates() -> None:
    def found(**options):
        return labels(SEVEN, EstimateConfig(after_first_error="keep", **options))

    assert found(estimate="hard", hard_threshold=6) == [1, 1, 0, 0, 0, X, 0]
    assert labels(SEVEN, EstimateConfig(estimate="hard", hard_threshold=6)) == [1, 1, 0, X, X, X, X]
    # The last step of a correct solution has one rollout, the solution itself.
    correct = RolloutCounts((7, 6, 1), (8, 8, 1), True)
    assert labels(correct, EstimateConfig(estimate="hard", hard_threshold=2)) == [1, 1, 1]
    assert labels(correct, EstimateConfig(estimate="hard", hard_threshold=7)) == [1, 0, X]
    assert found(estimate="relative", relative_threshold=0.75) == [1, 1, 1, 0, 0, X, 0]
    assert found(estimate="self_denoised", denoise_window=0) == [1, 1, 1, 1, 0, X, 0]
    assert found(estimate="self_denoised", denoise_window=4) == [1, 1, 1, 0.5, 0, X, 0]
    assert "at most 0.5" in found(estimate="self_denoised", denoise_floor=0.5)
    np.testing.assert_allclose(found(estimate="entropy", entropy_eta=3.0)[1], entropy(0.75, 3.0), rtol=1e-12)


def test_correct_solutions() -> None:
    right = RolloutCounts((7, X, 0, X, 1), (8, X, 0, X, 1), True, (4, X, X, X, 0), (1, 8), 5)
    assert labels(right, EstimateConfig(estimate="self_denoised")) == [1] * 5
    # A step whose rollouts all lack a verdict is as one that was not rolled.
    assert labels(right, EstimateConfig(estimate="hard")) == [1] * 5
    assert labels(right, EstimateConfig(estimate="hard", unrolled="null")) == [1, X, X, X, 1]
    assert labels(right, EstimateConfig(estimate="soft")) == [7 / 8, X, X, X, 1]
    assert labels(right, EstimateConfig(estimate="relative")) == [1, X, X, X, X]
    # What is left after a step is at most what is left after a later one, and the steps between.
    np.testing.assert_allclose(labels(right, EstimateConfig(estimate="value")), np.arange(1, 6) / 5, rtol=1e-12)


# A correct solution of four steps whose first step has no success in eight rollouts, where a sweep stops by default.
LUCKY = RolloutCounts((0, X, X, 1), (8, X, X, 1), True, (3, 2, 1, 0), (1, 2), 4)


@pytest.mark.parametrize(
    ("estimate", "null", "negative", "keep"),
    [
        ("hard", [0, X, X, X], [0, 0, 0, 0], [0, 1, 1, 1]),
        ("soft", [0, X, X, X], [0, 0, 0, 0], [0, X, X, 1]),
        ("relative", [0, X, X, X], [0, 0, 0, 0], [0, X, X, X]),
        ("entropy", [0, X, X, X], [0, 0, 0, 0], [0, X, X, 1]),
        # These judge a correct solution by its answer.
        ("self_denoised", [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]),
        ("value", [0.25, 0.5, 0.75, 1], [0.25, 0.5, 0.75, 1], [0.25, 0.5, 0.75, 1]),
    ],
)
def test_a_correct_solution_with_a_step_without_success(estimate, null, negative, keep) -> None:
    for after, expected in (("null", null), ("negative", negative), ("keep", keep)):
        found = labels(LUCKY, EstimateConfig(estimate=estimate, after_first_error=after))
        np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-12, err_msg=after)


def test_the_first_error_of_values_is_the_first_step_without_a_correct_continuation() -> None:
    # The second step has no success, but the third has: its continuations are those of the second, too.
    counts = RolloutCounts((8, 0, 1, 0), (8, 8, 8, 1), False, (3, X, 2, X), (4, 8), 4)
    found = labels(counts, EstimateConfig(estimate="value"))
    np.testing.assert_allclose(found, [1 / 4, 1 / 4 + 3 / 16, 7 / 16 + 9 / 48, 5 / 8 - 1 / 8], rtol=1e-12)


def test_relative_of_rates_that_are_zero_or_unknown() -> None:
    config = EstimateConfig(estimate="relative")
    assert labels(RolloutCounts((3, 0), (8, 8), question=(0, 4)), config) == [1, 0]
    assert labels(RolloutCounts((3, 0), (8, 8)), config) == [X, 0]


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=9), st.integers(1, 8))
def test_properties_of_all_estimates(pairs, base) -> None:
    successes = [s if rolled else None for s, rolled in pairs]
    counts = RolloutCounts(
        successes, [8 if rolled else None for _, rolled in pairs], False, [X] * len(pairs), (base, 8), 3
    )
    soft = labels(counts, EstimateConfig(estimate="soft", after_first_error="keep"))
    for estimate in ("hard", "relative", "entropy", "self_denoised", "value"):
        found = labels(counts, EstimateConfig(estimate=estimate))
        assert len(found) == len(pairs) and all(label is None or 0 <= label <= 1 for label in found)
    bent = labels(counts, EstimateConfig(estimate="entropy", after_first_error="keep", entropy_eta=1e-6))
    for one, other in zip(soft, bent, strict=True):
        assert one is other is None or abs(one - other) < 1e-5  # a small eta is the plain mean


def test_rows_are_read_with_an_estimate(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rolled.jsonl"
    path.write_text(json.dumps(ROW) + "\n")

    def found(**options):
        (trajectory,) = read(path, estimates=EstimateConfig(**options))
        return trajectory.labels

    np.testing.assert_array_equal(found(), np.array([1, 1, 1, 1, 0, X, X], np.float32))
    np.testing.assert_array_equal(found(estimate="soft"), np.array([1, 0.75, 0.625, 0.25, 0, X, X], np.float32))
    np.testing.assert_array_equal(
        found(estimate="hard", after_first_error="negative"), np.array([1, 1, 1, 1, 0, 0, 0], np.float32)
    )
    path.write_text(json.dumps({**ROW, "context_steps": 3}) + "\n")
    np.testing.assert_array_equal(found(estimate="soft"), np.array([X, X, X, 0.25, 0, X, X], np.float32))


def test_what_an_estimate_omits_is_counted(tmp_path: pathlib.Path) -> None:
    path, report = tmp_path / "rolled.jsonl", ReadReport()
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "correct": True}) + "\n")
    config = EstimateConfig(estimate="self_denoised", denoise_floor=0.5)
    assert len(list(read(path, report=report, estimates=config))) == 1
    assert dict(report.left_out) == {"incorrect solutions of questions with a rate of at most 0.5": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"successes": None}, "field 'successes': missing"),
        ({"rollouts": [8] * 6}, "field 'rollouts': 6 entries, and 7 steps"),
        ({"successes": [9, 6, 5, 2, 0, X, 0]}, "step 1: 9 successes of 8 rollouts"),
        ({"successes": [8, 6, 5, 2, 0, 0, 0]}, "step 6: 0 successes of None rollouts: both or neither may be null"),
        (
            {"successes": [0.5, 6, 5, 2, 0, X, 0]},
            "field 'successes': expected whole numbers from 0, or null; found 0.5",
        ),
        ({"rollouts": [True, 8, 8, 8, 8, X, 1]}, "field 'rollouts': expected whole numbers"),
        ({"correct": "no"}, "field 'correct': expected true, false or null, found 'no'"),
        ({"granularity": 2}, "field 'granularity': 2"),
        ({"context_steps": 8}, "context_steps is 8, and there are 7 steps"),
        ({"question_successes": X, "question_rollouts": X}, "no question_successes of question_rollouts"),
    ],
)
def test_bad_counts_name_the_field(tmp_path, change, message) -> None:
    path = tmp_path / "rolled.jsonl"
    path.write_text(json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(UserError, match=r"rolled.jsonl:1: ") as error:
        list(read(path, estimates=EstimateConfig(estimate="self_denoised")))
    assert message in str(error.value)


def test_math_aps_trees_and_prefixes() -> None:
    path = pathlib.Path(__file__).parent / "inputs" / "math_aps.jsonl"
    three, root = "3 * 4 = 12.", "math_aps.jsonl:1"
    found = [(t.steps, t.labels.tolist(), t.source, t.id, t.answer) for t in read(path)]
    assert [(steps, label[-1], source, name, answer) for steps, label, source, name, answer in found] == [
        ((three,), 0.75, root, "sum/1", "14"),
        ((three, "2 + 12 = 14."), 1.0, root, "sum/1", "14"),
        ((three, "2 + 12 = 15."), 0.0, root, "sum/1", "14"),
        (("2 + 3 = 5.",), 0.0, root, "sum/1", "14"),
        (("1 + 1",), 0.875, "math_aps.jsonl:2", "7", "2"),
        (("1 + 1 = 3",), 0.0, "math_aps.jsonl:2", "7", "2"),
    ]
    assert all(np.isnan(label[:-1]).all() for _, label, *_ in found)
    hard = [t.labels[-1] for t in read(path, estimates=EstimateConfig(estimate="hard"))]
    assert hard == [1, 1, 0, 0, 1, 0]
    relative = [t.labels[-1] for t in read(path, estimates=EstimateConfig(estimate="relative"))]
    np.testing.assert_array_equal(relative, [1, 1, 0, 0, np.nan, 0])


def test_prepare_derives_labels(tmp_path: pathlib.Path, capsys) -> None:
    (tmp_path / "rolled.jsonl").write_text(json.dumps(ROW) + "\n")
    arguments = [f"--input={tmp_path}/rolled.jsonl", f"--output={tmp_path}/out.jsonl", "--after_first_error=negative"]
    assert flags.run(prepare.PrepareConfig, prepare.main, ["prepare", *arguments, "--estimate=soft"]) == 0
    assert "estimate soft, after the first error: negative" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["labels"] == [1, 0.75, 0.625, 0.25, 0, 0, 0] and row["answer"] == "14"
