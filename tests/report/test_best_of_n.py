"""The progress of a grading: questions, their rate, and the time left by the bytes of the input."""

from __future__ import annotations

import io
import json

from cfprm_jax.report import best_of_n
from cfprm_jax.runtime.progress import ProgressLine


def test_the_time_left_is_that_of_both_inputs(tmp_path) -> None:
    """A question of each of two files has 30 s; all four rows have the same length."""
    now = [0.0]
    for name in "ab":
        rows = [{"id": str(q), "question": "q", "answer": "1", "candidates": [{"text": "1"}]} for q in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    text = io.StringIO()
    line = ProgressLine("grading", text, lambda: now[0])
    graded = best_of_n.GradingProgress(line, sum((tmp_path / f"{name}.jsonl").stat().st_size for name in "ab"))
    for path in inputs:
        for _ in graded.watched([path]):
            now[0] += 30
    assert text.getvalue().splitlines() == [
        "grading     1 questions, 0.0 questions/s, left 1:30",
        "grading     2 questions, 0.0 questions/s, left 1:00",
        "grading     3 questions, 0.0 questions/s, left 0:30",
    ]
