"""Parts of the questions, two systems, and correlations."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cfprm_jax.data.candidates import parse_question
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.best_of_n import outcomes
from cfprm_jax.evaluation.breakdown import Part, aligned, compare, correlations, parts
from cfprm_jax.evaluation.pool import make_pool
from cfprm_jax.grading.grader import Grader


def pool_of(rows, aggregations=("min",)):
    questions = [parse_question(row, f"c.jsonl:{line}") for line, row in enumerate(rows, 1)]
    return make_pool(Grader("none").judge(questions), aggregations)


def test_parts_are_data_sets_fields_and_critical_thinking(made_rows):
    found, members = parts(pool_of(made_rows))
    assert dict(zip(found, (line.nonzero()[0].tolist() for line in members), strict=True)) == {
        Part("", ""): [0, 1, 2, 3, 4, 5],
        Part("dataset", "math500"): [0, 1, 2, 3],
        Part("dataset", "gsm_plus"): [4, 5],
        Part("level", "1"): [0, 2],
        Part("level", "2"): [1, 3],
        Part("perturbation_type", "kind 4"): [4],
        Part("perturbation_type", "kind 5"): [5],
        Part("critical thinking", "with"): [4, 5],
        Part("critical thinking", "without"): [4],
    }


def test_what_does_not_divide_is_no_part(made_rows):
    one = [{**row, "level": 3, "perturbation_type": str(place)} for place, row in enumerate(made_rows[:4])]
    assert parts(pool_of(one[:1]))[0] == [Part("", "")]
    numbered = [{**row, "id": f"{place}", "subject": f"{place}", "level": 3} for place, row in enumerate(one * 9)]
    assert [part for part in parts(pool_of(numbered))[0] if part.by == "subject"] == []
    levels = [{**row, "level": level} for row, level in zip(made_rows, (10, 9, 10, 9, 1, 1), strict=True)]
    assert [part.value for part in parts(pool_of(levels))[0] if part.by == "level"] == ["1", "9", "10"]


def test_systems_are_compared_question_by_question_in_any_order(made_rows):
    first = pool_of(made_rows)
    second = aligned(first, pool_of([made_rows[place] for place in (3, 1, 0, 2, 5, 4)]))
    assert second.ids == first.ids and second.fields == first.fields
    for field in ("present", "correct", "group", "steps", "characters"):
        np.testing.assert_array_equal(getattr(first, field), getattr(second, field))
    for field in ("ranks", "weights"):
        np.testing.assert_array_equal(getattr(first, field)["min"], getattr(second, field)["min"])
    everything = np.ones((1, 6), bool)
    found = outcomes(first, (2,), 0, 0, everything)
    worse = dataclasses.replace(found, values=found.values * 0)
    by_key = {entry.key: entry for entry in compare(found, worse, 500, 0)}
    oracle = by_key[2, "oracle", None]
    assert (oracle.accuracy, oracle.accuracy2, oracle.difference) == (1.0, 0.0, 1.0)
    assert oracle.ci95 == (1.0, 1.0) and oracle.p_value == pytest.approx(2 / 501)
    assert all(entry.difference == 0 and entry.p_value == 1 for entry in compare(found, found, 500, 0))


def test_other_questions_or_counts_are_refused_by_name(made_rows):
    first = pool_of(made_rows)
    with pytest.raises(UserError, match=r"--input2 has no question 'gsm_plus-5', which c\.jsonl:6 has"):
        aligned(first, pool_of(made_rows[:5]))
    with pytest.raises(UserError, match=r"--input has no question 'gsm_plus-5', which c\.jsonl:6 has"):
        aligned(pool_of(made_rows[:5]), first)
    fewer = [{**made_rows[0], "candidates": made_rows[0]["candidates"][:3]}, *made_rows[1:]]
    with pytest.raises(UserError, match=r"question 'math500-0' has 4 candidates in c\.jsonl:1 and 3 in c\.jsonl:1"):
        aligned(first, pool_of(fewer))


def test_scores_that_grow_with_length_are_seen(made_rows):
    rows = []
    for number in range(5):
        scores = [[0.1 * k + 0.05 * number] * k for k in (1, 2, 3)]
        candidates = [{"text": "x" * (7 - len(s)), "step_scores": s, "correct": True, "predicted": "1"} for s in scores]
        unscored = {"text": "x", "step_scores": None, "correct": True, "predicted": "1"}
        rows.append({**made_rows[0], "id": number, "candidates": [*candidates, unscored]})
    found = {(entry.quantity, entry.candidates): entry for entry in correlations(pool_of(rows), (3,))}
    assert found["steps", "within questions"].spearman == pytest.approx(1.0)
    assert found["characters", "within questions"].spearman == pytest.approx(-1.0)
    assert found["steps", "all"].count == 15 and 0 < found["steps", "all"].spearman < 1
    assert found["steps", "chosen"].spearman is None and found["steps", "chosen"].count == 5
