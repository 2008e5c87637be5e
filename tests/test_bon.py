"""The bon command, end to end on small files."""

from __future__ import annotations

import json

import pytest

from cfprm_jax import bon, flags


def row(name, *candidates):
    made = [{"text": "", "step_scores": s, "predicted": p, "correct": c} for s, p, c in candidates]
    return {"id": name, "question": "?", "answer": "1", "candidates": made}


ROWS = [
    row("a", ([0.9], "2", False), ([0.8, 0.95], "1", True)),
    row("b", ([0.5], "2", False), ([0.6], "1", True)),
]


@pytest.fixture
def scored(tmp_path):
    path = tmp_path / "scored.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return path


def run(*arguments):
    return flags.run(bon.BonConfig, bon.main, ["bon", *arguments])


def test_it_writes_results_table_and_flags_and_prints_the_table(scored, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"--input={scored}", "--n=1,2", "--aggregation=min,last", "--seed=3", f"--output_dir={out}"]
    assert run(*arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["config"]["grader"] == "none" and results["config"]["seed"] == 3
    assert results["config"]["n"] == [1, 2] and results["config"]["aggregation"] == ["min", "last"]
    assert (results["questions"], results["pool"]) == (2, 2)
    by_key = {(r["n"], r["method"], r["aggregation"]): r for r in results["rows"]}
    assert by_key[2, "best_of_n", "min"]["accuracy"] == 0.5
    assert by_key[2, "best_of_n", "last"]["accuracy"] == 1.0
    assert by_key[1, "majority", None]["accuracy"] == 0.0
    assert by_key[2, "oracle", None]["accuracy"] == 1.0
    assert by_key[2, "pass_at_1", None]["accuracy"] == 0.5
    assert len(results["rows"]) == 2 * (2 + 2 + 4)
    text = (out / "table.md").read_text()
    assert "| best of n, last " in text and text in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["n"] == ["1", "2"]
    # The flags that were written give the same again, into the same place.
    before = (out / "results.json").read_text()
    assert run(f"--flagfile={out / 'run.flags'}") == 0
    assert (out / "results.json").read_text() == before


def test_the_exact_grader_compares_answers(scored, tmp_path):
    assert run(f"--input={scored}", "--n=2", "--grader=exact", f"--output_dir={tmp_path / 'out'}") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["config"]["grader"] == "exact"
    assert {r["accuracy"] for r in results["rows"] if r["aggregation"] == "last"} == {1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n=2,4"], "--n=4: question 'a' has only 2 candidates"),
        (["--n=0"], "--n: '0' is not a positive whole number"),
        (["--n=two"], "--n: 'two' is not a positive whole number"),
        (["--n="], "--n is empty"),
        (["--n=2,2"], "--n=2,2 names something twice"),
        (["--n=2", "--aggregation=median"], "--aggregation: median is not among: min, last, product, mean"),
        (["--n=2", "--grader=guess"], "grader"),
        (["--n=2", "--draws=-1"], "draws"),
        (["--n=2", "--input="], "--input is empty"),
        (["--n=2", "--output_dir="], "--output_dir is empty"),
        (["--n=2", "--input=nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(scored, tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert run(f"--input={scored}", f"--output_dir={out}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not out.exists()


def test_a_directory_that_holds_something_else_is_left_alone(scored, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert run(f"--input={scored}", "--n=2", f"--output_dir={out}") == 2
    assert "holds something else (config.json, ...)" in capsys.readouterr().err
    assert (out / "config.json").read_text() == "{}"
