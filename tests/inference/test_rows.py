"""Scores into rows: what is added, and that nothing else changes."""

from __future__ import annotations

import copy
import types

import numpy as np
import pytest

from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.inference import rows as rows_module
from cfprm_jax.inference.rows import ScoringCounts, decimals, score_rows, scored_questions, sigmoid
from cfprm_jax.inference.scorer import Scorer

QUESTION = "start=three+two-four"
STEPS = ["three+two=five", "five-four=one", "answer=one"]


@pytest.fixture(scope="module")
def scorer(loaded):
    return Scorer(loaded, batch_rows=2)


def test_logits_are_written_with_no_more_digits_than_float32_has() -> None:
    values = np.array([0.1, -1.3, 1e-8, 16777216.0], np.float32)
    assert decimals(values) == [0.1, -1.3, 1e-8, 16777216.0]
    np.testing.assert_array_equal(np.float32(decimals(values)), values)


def test_candidates_get_scores_and_keep_all_else(scorer):
    row = {
        "extra": {"deep": [1, None]},
        "id": "q",
        "question": QUESTION,
        "answer": "one",
        "candidates": [
            {"steps": STEPS, "text": "something else", "note": "kept", "step_scores": [0.5] * 3},
            {"text": "\n\n".join(STEPS), "correct": True},
            {"steps": []},
            {"steps": STEPS * 20},
            {"text": " "},
            {"text": "\n".join(STEPS)},
        ],
    }
    before, counts = copy.deepcopy(row), ScoringCounts()
    ((scored, source),) = score_rows([(row, "c.jsonl:1")], scorer, counts)
    assert source == "c.jsonl:1"
    given, split, empty, long, blank, lines = scored["candidates"]
    (logits,) = scorer.score([(QUESTION, STEPS)])
    np.testing.assert_array_equal(np.float32(given["step_logits"]), logits)
    np.testing.assert_array_equal(given["step_scores"], sigmoid(logits))
    np.testing.assert_allclose(split["step_logits"], logits, rtol=1e-5)
    for candidate in (empty, long, blank):
        assert candidate["step_scores"] is None and candidate["step_logits"] is None
    assert len(lines["step_scores"]) == 1, "single line breaks separate no steps"
    texts = SplitCounts(texts=3, unsplit=1)
    assert counts == ScoringCounts(rows=1, solutions=6, steps=7, empty=2, too_long=1, split=texts)
    for after, original in zip(scored["candidates"], before["candidates"], strict=True):
        added = {"step_scores", "step_logits"}
        assert {k: v for k, v in after.items() if k not in added} == {
            k: v for k, v in original.items() if k not in added
        }
    assert {k: v for k, v in scored.items() if k != "candidates"} == {
        k: v for k, v in before.items() if k != "candidates"
    }


@pytest.mark.parametrize(
    "old",
    [
        {"step_scores": [0.5]},  # of the text before it had steps
        {"step_scores": [0.5] * 3, "step_logits": [0.0]},
        {"step_scores": [1.5, -3, float("nan")], "step_redundancy": 7},  # of another program
        {"step_scores": "none", "step_logits": {}},
    ],
)
def test_old_scores_are_replaced_whatever_they_are(scorer, old):
    def row(**scores):
        return {"id": 1, "question": QUESTION, "answer": "one", "candidates": [{**scores, "steps": STEPS}]}

    ((new, _),) = score_rows([(row(), "c:1")], scorer, ScoringCounts())
    ((again, _),) = score_rows([(row(**old), "c:1")], scorer, ScoringCounts())
    assert again == new


def test_a_score_that_is_not_finite_names_the_row(scorer, monkeypatch):
    bad = [None, np.array([[1.0], [np.nan]], np.float32)]
    monkeypatch.setattr(scorer, "start", lambda plan: types.SimpleNamespace(outputs=lambda: bad))
    rows = [({"prompt": QUESTION, "completions": STEPS[:number]}, f"c.jsonl:{number}") for number in (1, 2)]
    with pytest.raises(UserError, match=r"c.jsonl:2: the model gives a score that is not finite: \[1.0, nan\]"):
        list(score_rows(rows, scorer, ScoringCounts()))


def test_stepwise_rows_get_scores_and_keep_all_else(scorer):
    row = {"prompt": QUESTION, "completions": STEPS, "labels": [True, None, 0.7], "id": 5}
    ((scored, _),) = score_rows([(dict(row), "t.jsonl:1")], scorer, ScoringCounts())
    assert {k: scored[k] for k in row} == row
    (logits,) = scorer.score([(QUESTION, STEPS)])
    np.testing.assert_array_equal(np.float32(scored["step_logits"]), logits)
    assert len(scored["step_scores"]) == 3


def numbered(count, read):
    for number in range(count):
        read.append(number)
        yield {"prompt": QUESTION, "completions": STEPS[: 1 + number % 3], "number": number}, f"t:{number}"


def test_rows_come_out_in_order_and_before_all_are_read(scorer, monkeypatch):
    monkeypatch.setattr(rows_module, "_SOLUTIONS", 50)
    read = []
    scored = score_rows(numbered(300, read), scorer, ScoringCounts())
    first, _ = next(scored)
    assert first["number"] == 0 and len(read) <= 200
    rest = [(row["number"], len(row["step_logits"])) for row, _ in scored]
    assert rest == [(number, 1 + number % 3) for number in range(1, 300)]


@pytest.mark.parametrize("written", [1, 49, 50, 51, 130, 299, 300])
def test_what_is_written_is_left_out_and_the_rest_is_the_same_to_the_bit(scorer, monkeypatch, written):
    monkeypatch.setattr(rows_module, "_SOLUTIONS", 50)
    whole = [row for row, _ in score_rows(numbered(300, []), scorer, ScoringCounts())]
    counts = ScoringCounts()
    found = [(row, counts.ready) for row, _ in score_rows(numbered(300, []), scorer, counts, written)]
    rest = [row for row, _ in found]
    # Those of a group follow at once.
    assert [ready for _, ready in found] == [49 - number % 50 for number in range(written, 300)]
    assert rest == whole[written:] and counts.rows == counts.solutions == 300 - written
    assert counts.steps == sum(len(row["completions"]) for row in rest)


def test_a_row_that_cannot_be_read_ends_it(scorer, monkeypatch):
    monkeypatch.setattr(rows_module, "_SOLUTIONS", 2)

    def items():
        yield from numbered(4, [])
        raise UserError("file ends")

    with pytest.raises(UserError, match="file ends"):
        list(score_rows(items(), scorer, ScoringCounts()))


@pytest.mark.parametrize("row", [{}, {"prompt": "a", "completions": "b"}, {"prompt": 1, "completions": ["b"]}])
def test_rows_of_no_known_format_are_refused(scorer, row):
    with pytest.raises(UserError, match=r"x\.jsonl:9: neither a candidates row"):
        list(score_rows([(row, "x.jsonl:9")], scorer, ScoringCounts()))


def test_questions_in_memory(scorer, world):
    questions = list(read_candidates(world.candidates))
    scored = list(scored_questions(iter(questions), scorer))
    assert [q.id for q in scored] == [q.id for q in questions]
    assert [q.source for q in scored] == [q.source for q in questions]
    assert all(len(c.step_logits) == len(c.steps) for q in scored for c in q.candidates)
    assert not any(c.was_scored for q in questions for c in q.candidates)
    assert not any("step_scores" in c for q in questions for c in q.row["candidates"])


def test_sigmoid_is_exact_and_does_not_overflow():
    z = np.array([-1e4, -30.0, 0.0, 2.0, 40.0, 1e4], np.float32)
    np.testing.assert_allclose(sigmoid(z), [0, 9.357622968839299e-14, 0.5, 0.8807970779778823, 1, 1], rtol=1e-14)
