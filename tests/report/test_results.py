"""results.json and table.md."""

from __future__ import annotations

import json

from documented_keys import check as check_keys

from cfprm_jax.report import results


def test_results_hold_the_rows_and_what_they_depend_on(result, tmp_path):
    results.write(result.outcome, tmp_path)
    read = json.loads((tmp_path / "results.json").read_text())
    assert read == json.loads(json.dumps(result.outcome))
    check_keys("results.json of bon", read)
    assert read["config"]["grader"] == "none" and read["config"]["n"] == [2, 4] and read["config"]["seed"] == 0
    assert (read["questions"], read["pool"], read["unscored"]) == (6, 4, 6)
    assert read["datasets"] == ["math500", "gsm_plus"]
    first = read["rows"][0]
    assert set(first) == {"n", "method", "aggregation", "accuracy", "ci95", "draws", "draw_std"}
    assert (first["n"], first["method"], first["aggregation"], first["accuracy"]) == (2, "best_of_n", "min", 1.0)
    assert len(read["rows"]) == 2 * (2 + 2 + 4)
    assert [(part["by"], part["value"], part["questions"]) for part in read["parts"]][:2] == [
        ("dataset", "math500", 4),
        ("dataset", "gsm_plus", 2),
    ]
    assert all(len(part["rows"]) == len(read["rows"]) for part in read["parts"])
    assert read["grading"]["candidates"] == 24 and read["comparison"] == [] and read["rows2"] == []


def test_the_document_describes_its_numbers(result, compared):
    text = results.document(result.outcome)
    for part in (
        "| data set | method",
        "over 6 questions. 4 candidates a question, 6 of them without scores; first n. Grader: none. Seed: 0.",
        '24 candidates, right or wrong by their own "correct".',
        "## By level, n = 4",
        "## By critical thinking, n = 4",
        "## Correlation of scores with length",
    ):
        assert part in text
    assert "A_1 minus B on the same questions" in results.document(compared.outcome)


def test_the_grading_note_counts_what_went_wrong(result):
    grading = {
        "grader": "math_verify",
        "candidates": 8000,
        "without_answer": 3,
        "pairs_compared": 1200,
        "seconds_a_pair": 5.0,
        "without_verdict": 2,
        "with_own_correct": 8000,
        "differs_from_own_correct": 43,
    }
    assert results.grading_note({"grading": grading}) == (
        "8,000 candidates graded by math_verify; 3 give no answer; 2 of 1,200 pairs of answers took longer than 5 s or "
        'could not be read, and count as different; 43 of 8,000 differ from their own "correct".'
    )
    pairs = [{"id": "q", "predicted": "a|b", "answer": "c", "graded": True, "candidates": 4}]
    outcome = {**result.outcome, "grading": {**grading, "pairs_that_differ": pairs}}
    assert "| q        | `a\\|b`    | `c`       | right  | 4          |" in results.document(outcome)
