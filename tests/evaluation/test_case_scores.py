"""Files of scores: rows that belong to cases, and those that do not."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cfprm_jax.data.step_cases import Case
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.case_scores import read_scores, row_of


def case(idx):
    return Case("prm_bench", "circular", idx, "q", ("a", "b"), (2,), "q", frozenset({"q"}), f"in:{idx}", "in", 2)


CASES = [case("0"), case("1")]


def row(idx, **fields):
    return {**row_of(case(idx), {"step_scores": [0.25, 1]}), **fields}


def written(tmp_path, rows):
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return tmp_path / "scores.jsonl"


def test_rows_come_back(tmp_path):
    rows = [row("1", step_redundancy=[0, 0.5]), row("0", step_redundancy=[0.5, 1], extra=1)]
    assert list(row("0")) == ["classification", "idx", "question", "steps", "step_scores", "error_steps"]
    found = read_scores(written(tmp_path, rows), CASES)
    assert set(found.scores) == {("circular", "0"), ("circular", "1")} and found.unscored == 0
    np.testing.assert_array_equal(found.scores["circular", "0"].validity, [0.25, 1])
    np.testing.assert_array_equal(found.scores["circular", "0"].redundancy, [0.5, 1])


def test_doubled_missing_and_unscored_rows(tmp_path):
    found = read_scores(written(tmp_path, [row("0"), row("0", step_scores=[0, 0]), row("1", step_scores=None)]), CASES)
    assert found.scores["circular", "0"].validity[1] == 1 and found.unscored == 1 and len(found.scores) == 1
    assert found.doubled == (("scores.jsonl:2", "scores.jsonl:1"),)
    assert len(read_scores(written(tmp_path, [row("1")]), CASES).scores) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("2"), "case '2' of 'circular' is not among the 2 cases of --input"),
        (row("1", steps=["a", "c"]), '"steps" is another than that of in:1: scores of another file?'),
        (row("1", question="r"), '"question" is another than that of in:1'),
        ({**row("1"), "idx": 1}, '"classification" or "idx" is missing or not a string'),
        ({key: value for key, value in row("1").items() if key != "step_scores"}, 'no "step_scores"'),
        (row("1", step_scores=[0.5]), '"step_scores" is not a list of 2 numbers, one a step'),
        (row("1", step_scores=[0.5, 1.5]), '"step_scores" holds 1.5, expected numbers in [0, 1]'),
        (row("1", step_scores=[0.5, True]), '"step_scores" holds True'),
        (row("1", step_scores=[0.5, float("nan")]), '"step_scores" holds None'),
        (row("1", step_redundancy=[0.5]), '"step_redundancy" is not a list of 2 numbers'),
        (row("1", step_redundancy=[0.5, 0.5]), 'scores.jsonl:1: no "step_redundancy", but scores.jsonl:2 has it'),
    ],
)
def test_bad_rows_are_named(tmp_path, bad, message):
    with pytest.raises(UserError) as error:
        read_scores(written(tmp_path, [row("0"), bad]), CASES)
    assert message in str(error.value) and str(error.value).startswith("scores.jsonl:")
