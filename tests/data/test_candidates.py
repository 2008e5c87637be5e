"""The candidates file is read strictly: every fault has a message with file, line and field."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.errors import UserError

GOOD = {
    "id": "q1",
    "question": "1 + 1?",
    "answer": "2",
    "candidates": [
        {"text": "one\n\ntwo", "steps": ["one", "two"], "step_scores": [0.5, 1], "step_logits": [0.0, 40.5]},
        {"steps": [], "step_scores": None, "predicted": "2", "correct": True, "note": 7},
        {"text": "none"},
    ],
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def changed(**fields):
    return {**GOOD, **fields}


def candidate(**fields):
    return changed(candidates=[{"steps": ["a", "b"], **fields}])


def test_a_row_becomes_a_question(tmp_path):
    (question,) = read_candidates(write(tmp_path / "c.jsonl", GOOD))
    assert (question.id, question.question, question.answer) == ("q1", "1 + 1?", "2")
    assert (question.dataset, question.source) == (None, "c.jsonl:1")
    assert question.row == GOOD
    first, second, third = question.candidates
    assert first.steps == ("one", "two") and first.text == "one\n\ntwo" and first.was_scored
    np.testing.assert_array_equal(first.step_scores, [0.5, 1.0])
    np.testing.assert_array_equal(first.step_logits, [0.0, 40.5])
    assert second.steps == () and second.step_scores is None and second.was_scored
    assert second.predicted == "2" and second.correct is True
    assert third.steps is None and not third.was_scored


def test_gzip_globs_and_several_files_in_order(tmp_path):
    write(tmp_path / "b.jsonl", changed(id="q2"))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(GOOD) + "\n")
    assert [q.id for q in read_candidates(f"{tmp_path}/*.jsonl*")] == ["q1", "q2"]


def test_an_id_may_be_a_whole_number_and_stays_one(tmp_path):
    path = write(tmp_path / "c.jsonl", {**GOOD, "id": 3}, {**GOOD, "id": "3"})
    assert [question.id for question in read_candidates(path)] == [3, "3"]


def test_reading_is_a_stream(tmp_path):
    path = write(tmp_path / "c.jsonl", GOOD, {"id": "q2"})
    questions = read_candidates(path)
    assert next(questions).id == "q1"
    with pytest.raises(UserError, match=r"c\.jsonl:2"):
        next(questions)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(id=3.5), 'c.jsonl:1: "id" is a number, expected a string'),
        (changed(id=True), 'c.jsonl:1: "id" is true or false, expected a string'),
        ({k: v for k, v in GOOD.items() if k != "answer"}, 'c.jsonl:1: no "answer"'),
        (changed(answer=None), 'c.jsonl:1: "answer" is null, expected a string'),
        (changed(dataset=[]), '"dataset" is an array, expected a string'),
        (changed(candidates={}), '"candidates" is an object, expected an array'),
        (changed(candidates=[]), '"candidates" is empty'),
        (changed(candidates=["x"]), "candidate 0: expected an object, found a string"),
        (changed(candidates=[{"predicted": "2"}]), 'candidate 0: neither "text" nor "steps"'),
        (candidate(steps=["a", 1]), '"steps" holds a number, expected strings'),
        (candidate(step_scores=[0.5]), "candidate 0: 2 steps and 1 step_scores"),
        (candidate(step_scores=[0.5, 1.5]), '"step_scores" holds 1.5, expected numbers in [0, 1]'),
        (candidate(step_scores=[0.5, True]), '"step_scores" holds true or false, expected numbers'),
        (candidate(step_scores=[0.5, float("nan")]), '"step_scores" holds null, expected numbers'),
        (candidate(step_scores=[0.5, 10**400]), '"step_scores" holds 1000'),
        (candidate(step_scores="high"), '"step_scores" is a string, expected an array'),
        (candidate(step_logits=[1.0, 2.0]), "2 step_logits and none step_scores"),
        (candidate(step_scores=[0.5, 0.5], step_logits=[1.0]), "1 step_logits and 2 step_scores"),
        (candidate(correct=1), '"correct" is a number, expected true or false'),
        (candidate(predicted=2), '"predicted" is a number, expected a string'),
        (7, "c.jsonl:1: expected a JSON object, found a number"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        list(read_candidates(write(tmp_path / "c.jsonl", row)))
    assert message in str(error.value)


def test_a_question_that_occurs_twice(tmp_path):
    path = write(tmp_path / "c.jsonl", GOOD, changed(dataset="other"), GOOD)
    with pytest.raises(UserError, match=r"c\.jsonl:3: \"id\" 'q1' was already that of c\.jsonl:1"):
        list(read_candidates(path))


def test_broken_json_and_missing_file(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    with pytest.raises(UserError, match=r"c\.jsonl:2: not JSON"):
        list(read_candidates(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match="no such file"):
        list(read_candidates(tmp_path / "d.jsonl"))
