"""The process_bench command: published files, scored rows, thresholds."""

from __future__ import annotations

import json
import resource

import jax
import numpy as np
import pytest
from documented_keys import check as check_keys
from exported_prm import export_random

import cfprm_jax
from cfprm_jax import flags, process_bench, synthetic
from cfprm_jax.benchmarks.process_bench import evaluate, read


def row(name, label, scores=None, **fields):
    steps = [f"step {place}" for place in range(3)]
    scored = {} if scores is None else {"step_scores": scores}
    return {"id": name, "problem": "?", "steps": steps, "label": label, **scored, **fields}


SCORED = [
    row("gsm8k-0", 1, [0.9, 0.4, 0.1]),
    row("gsm8k-1", -1, [0.9, 0.7, 0.6]),
    row("math-0", 2, [0.9, 0.45, 0.3]),
    row("math-1", -1, [0.9, 0.9, 0.9], final_answer_correct=True),
    row("math-2", 0, [0.2, 0.9, 0.9]),
]


def run(*arguments):
    return flags.run(process_bench.ProcessBenchConfig, process_bench.main, ["process_bench", *arguments])


def written(directory):
    predictions = [json.loads(line) for line in (directory / "predictions.jsonl").read_text().splitlines()]
    return json.loads((directory / "results.json").read_text()), predictions


def test_scored_rows_need_no_model(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(SCORED))
    assert run(f"--input={tmp_path / 'rows.json'}", f"--output_dir={tmp_path / 'out'}") == 0
    results, predictions = written(tmp_path / "out")
    assert [p["prediction"] for p in predictions] == [1, -1, 1, -1, 0]
    assert predictions[3]["final_answer_correct"] is True and predictions[3]["subset"] == "math"
    assert results["threshold"] == 0.5 and results["tuned_on"] is None
    check_keys("results.json of process_bench", results)
    check_keys("diagnostics", results["diagnostics"])
    assert results["subsets"]["gsm8k"]["f1"] == 1.0
    assert results["subsets"]["math"]["accuracy_erroneous"] == 0.5
    assert results["subsets"]["math"]["f1"] == pytest.approx(2 / 3)
    assert results["average_f1"] == pytest.approx(5 / 6)
    out = capsys.readouterr().out
    assert "| math    | 2         | 1       | 50.0                  | 100.0               | 66.7  |" in out
    assert "below 0.5 (--threshold). 0 solutions could not be scored" in out
    # Its predictions are rows with scores, too.
    again = tmp_path / "again"
    assert run(f"--input={tmp_path / 'out' / 'predictions.jsonl'}", "--threshold=0.42", f"--output_dir={again}") == 0
    results, predictions = written(again)
    assert [p["prediction"] for p in predictions] == [1, -1, 2, -1, 0] and results["average_f1"] == 1.0


def test_a_tuned_threshold_is_named_with_where_it_comes_from(tmp_path):
    shifted = [{**r, "step_scores": [score / 3 for score in r["step_scores"]]} for r in SCORED]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in shifted))
    out = tmp_path / "out"
    assert run(f"--input={tmp_path / 'rows.jsonl'}", "--tune_on=gsm8k", f"--output_dir={out}") == 0
    results, _ = written(out)
    assert results["tuned_on"] == "gsm8k" and 0.4 / 3 < results["threshold"] <= 0.2
    assert results["subsets"]["gsm8k"]["f1"] == 1.0
    assert results["average_f1_without_tuned"] == results["subsets"]["math"]["f1"]
    table = (out / "table.md").read_text()
    assert "gsm8k (tuned on)" in table and "average without gsm8k" in table and "(tuned on gsm8k)" in table


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (SCORED, ["--tune_on=omnimath"], "--tune_on=omnimath is not among the subsets: gsm8k, math"),
        ([row("a-1", 0)], [], 'rows.json:1: no "step_scores"'),
        ([row("a-1", 3)], [], 'rows.json:1: "label" is 3, expected the index of one of 3 steps, or -1'),
        ([row("a-1", True)], [], 'rows.json:1: "label" is True'),
        ([row("a-1", 0, [0.5])], [], 'rows.json:1: "step_scores" is not a list of 3 numbers'),
        ([row("a-1", 0, [0.5, 2, 0])], [], 'rows.json:1: "step_scores"'),
        ([{**row("a-1", 0), "steps": []}], [], '"steps" is missing, empty'),
        ([{"steps": ["a"], "label": 0}], [], '"problem" is missing'),
        (SCORED[:2] + SCORED[3:4], ["--tune_on=math"], "--tune_on=math has no solutions with an error"),
        (SCORED[1:3], ["--tune_on=math"], "--tune_on=math has no correct solutions"),
        (SCORED, ["--model=a", "--checkpoint=b"], "--checkpoint (a run of train)"),
        (SCORED, ["--input="], "--input is empty"),
        (SCORED, ["--output_dir="], "--output_dir is empty"),
        (SCORED, ["--threshold=2"], "threshold"),
        (SCORED, ["--max_length=64"], "--max_length=64 is for scoring with --model or --checkpoint"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, rows, arguments, message):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    out = tmp_path / "out"
    assert run(f"--input={tmp_path / 'rows.json'}", f"--output_dir={out}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not out.exists()


def test_results_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(json.dumps(SCORED))
    assert run(f"--input={tmp_path / 'rows.json'}", f"--output_dir={tmp_path}") == 2
    assert f"--output_dir={tmp_path} " in capsys.readouterr().err


def test_a_model_scores_the_steps(tmp_path_factory, monkeypatch):
    tmp_path = tmp_path_factory.mktemp("model")
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    world = synthetic.materialise(
        tmp_path / "world",
        0,
        synthetic.WorldConfig(train_problems=2, held_out_problems=3, solutions_per_problem=2, candidates_per_problem=2),
    )
    export_random(world.model, tmp_path / "prm")
    candidates = [json.loads(line) for line in world.candidates.read_text().splitlines()]
    rows = [
        {"id": str(place), "problem": c["question"], "steps": c["candidates"][0]["steps"], "label": -1}
        for place, c in enumerate(candidates)
    ]
    rows.append({"id": "long", "problem": rows[0]["problem"], "steps": rows[0]["steps"] * 40, "label": 0})
    (tmp_path / "world.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = [f"--model={tmp_path / 'prm'}", "--dtype=float32", f"--input={tmp_path / 'world.jsonl'}"]
    assert run(*arguments, f"--output_dir={tmp_path / 'out'}") == 0
    results, predictions = written(tmp_path / "out")
    assert results["config"]["encoding"] == "cfprm"
    assert list(results["subsets"]) == ["world"] and results["subsets"]["world"]["unscored"] == 1
    assert predictions[-1]["step_scores"] is None and predictions[-1]["prediction"] is None
    reference = cfprm_jax.load(tmp_path / "prm")
    for prediction in predictions[:-1]:
        expected = reference.score(prediction["problem"], prediction["steps"])
        np.testing.assert_allclose(prediction["step_scores"], expected, rtol=1e-5)
        below = [place for place, score in enumerate(prediction["step_scores"]) if score < 0.5]
        assert prediction["prediction"] == (below[0] if below else -1)


def test_results_are_whole_or_not_there(tmp_path, capsys, monkeypatch):
    """A run that fails while it writes leaves nothing, and the same command then works."""
    (tmp_path / "rows.json").write_text(json.dumps(SCORED * 20))
    arguments = (f"--input={tmp_path / 'rows.json'}", f"--output_dir={tmp_path / 'out'}")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # room for the first files, not for the predictions
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
        assert run(*arguments) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    assert run(*arguments) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "predictions.jsonl",
        "results.json",
        "run.flags",
        "table.md",
    }


def test_published_files_are_read(shared):
    rows = list(read([str(shared / "data" / "process_bench" / "*.json")]))
    assert {name: sum(r["subset"] == name for r in rows) for name in ("gsm8k", "math")} == {"gsm8k": 400, "math": 1000}
    assert sum(r["label"] == -1 for r in rows) == 193 + 406
    # A perfect scorer has F1 1.
    for r in rows:
        r["step_scores"] = [0.1 if place == r["label"] else 0.9 for place in range(len(r["steps"]))]
    outcome = evaluate(rows, process_bench.ProcessBenchConfig())
    assert outcome["average_f1"] == 1.0
