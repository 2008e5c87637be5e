"""The table and the object of results.json."""

from __future__ import annotations

import json

import numpy as np

from cfprm_jax.evaluation.best_of_n import Pool, Row
from cfprm_jax.evaluation.report import caption, results, table, write

ROWS = [
    Row(8, "majority", None, 0.5, (0.25, 0.75), 0, None),
    Row(8, "best_of_n", "min", 0.5, (0.25, 0.75), 3, 0.0123),
    Row(16, "best_of_n", "min", 1.0, (1.0, 1.0), 3, 0.0),
    Row(16, "majority", None, 0.625, (0.0, 1.0), 0, None),
]
PRESENT = np.array([[True, True], [True, False]])
POOL = Pool(("a", "b"), PRESENT, PRESENT, PRESENT * 1, {}, {}, 1)


def test_the_table_has_a_line_a_method_and_a_column_an_n():
    assert table(ROWS) == (
        "| method         | n = 8                   | n = 16                     |\n"
        "|----------------|-------------------------|----------------------------|\n"
        "| best of n, min | 50.0 ± 1.2 [25.0, 75.0] | 100.0 ± 0.0 [100.0, 100.0] |\n"
        "| majority vote  | 50.0 [25.0, 75.0]       | 62.5 [0.0, 100.0]          |\n"
    )


def test_results_hold_what_the_numbers_depend_on(tmp_path):
    outcome = results({"grader": "none", "seed": 5, "draws": 3}, POOL, ROWS)
    write(outcome, "text\n", tmp_path)
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["config"] == {"grader": "none", "seed": 5, "draws": 3}
    assert (read["questions"], read["pool"], read["unscored"]) == (2, [1, 2], 1)
    assert read["rows"][1] == {
        "n": 8,
        "method": "best_of_n",
        "aggregation": "min",
        "accuracy": 0.5,
        "ci95": [0.25, 0.75],
        "draws": 3,
        "draw_std": 0.0123,
    }
    assert (tmp_path / "table.md").read_text() == "text\n"
    text = caption(outcome)
    assert "over 2 questions" in text and "1 to 2 candidates" in text and "1 of them without scores" in text
    assert "3 random subsets" in text and "Grader: none" in text and "Seed: 5" in text
