"""The bon command, end to end on small files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cfprm_jax import bon, flags
from cfprm_jax.evaluation.options import BonConfig

OUTPUTS = {"results.json", "table.md", "table.tex", "plot.png", "report.html", "config.json", "run.flags"}


def row(name, *candidates, **fields):
    made = [{"text": "", "step_scores": s, "predicted": p, "correct": c} for s, p, c in candidates]
    return {"id": name, "question": "?", "answer": "1", "candidates": made, **fields}


ROWS = [
    row("a", ([0.9], "2", False), ([0.8, 0.95], "1", True)),
    row("b", ([0.5], "2", False), ([0.6], "1.0", True)),
]


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def scored(tmp_path):
    return write(tmp_path / "scored.jsonl", ROWS)


def run(*arguments):
    return flags.run(BonConfig, bon.main, ["bon", *arguments])


def results(directory):
    return json.loads((directory / "results.json").read_text())


def test_by_default_the_usual_n_that_every_question_has(tmp_path, capsys):
    """Nine and eight candidates: 8 alone. Two: both. The rest of 8, 16, 32 and 64 is named; --n=16 is an error.

    The line of the options has the n that the table has.
    """
    pair = ([0.9], "1", True), ([0.1], "2", False)
    scored = write(tmp_path / "scored.jsonl", [row("a", *4 * pair), row("b", *4 * pair, pair[0])])
    few = write(tmp_path / "few.jsonl", [row("a", *pair)])
    uneven = write(tmp_path / "uneven.jsonl", [row("a", *pair), row("b", *pair, pair[0])])
    given = ["--grader=none", "--resamples=100", f"--output_dir={tmp_path / 'out'}"]
    for path, sizes, left_out, shown in (
        (scored, [8], "16, 32, 64", "8"),
        (few, [2], "8, 16, 32, 64", "2, all of the candidates"),
        (uneven, [2], "8, 16, 32, 64", "2, the fewest candidates of a question"),
    ):
        assert run(f"--input={path}", *given) == 0
        found = results(tmp_path / "out")
        assert found["config"]["n"] == sizes == sorted({line["n"] for line in found["rows"]})
        printed = capsys.readouterr().out
        assert f"n = {left_out} left out: not every question has that many" in printed
        lines = [line for line in printed.splitlines() if line.startswith("best of n   ")]
        assert lines == [
            f"best of n   n = {shown}; aggregation min, last, product, mean, the first n, grader none",
        ]
    assert run(f"--input={scored}", "--n=8,16", *given) == 2
    assert "--n=16: question 'a' has only 8 candidates" in capsys.readouterr().err


def test_it_writes_everything_and_prints_the_table(scored, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"--input={scored}", "--n=1,2", "--aggregation=min,last", "--seed=3", f"--output_dir={out}"]
    assert run(*arguments) == 0
    assert {path.name for path in out.iterdir()} == OUTPUTS
    found = results(out)
    assert found["config"]["grader"] == "math_verify" and found["config"]["seed"] == 3
    assert found["config"]["n"] == [1, 2] and found["config"]["aggregation"] == ["min", "last"]
    assert (found["questions"], found["pool"]) == (2, 2)
    by_key = {(r["n"], r["method"], r["aggregation"]): r for r in found["rows"]}
    assert by_key[2, "best_of_n", "min"]["accuracy"] == 0.5
    assert by_key[2, "best_of_n", "last"]["accuracy"] == 1.0
    assert by_key[1, "majority", None]["accuracy"] == 0.0
    assert by_key[2, "oracle", None]["accuracy"] == 1.0
    assert by_key[2, "pass_at_1", None]["accuracy"] == 0.5
    assert len(found["rows"]) == 2 * (2 + 2 + 4)
    assert found["grading"]["differs_from_own_correct"] == 0
    printed = capsys.readouterr().out
    assert "| best of n, last " in (out / "table.md").read_text() and "| best of n, last " in printed
    assert "4 candidates graded by math_verify; 0 of 4 differ" in printed and str(out / "report.html") in printed
    assert json.loads((out / "config.json").read_text())["n"] == ["1", "2"]
    # The flags that were written give the same again, into the same place.
    before = {name: (out / name).read_bytes() for name in OUTPUTS - {"plot.png"}}
    assert run(f"--flagfile={out / 'run.flags'}") == 0
    assert {name: (out / name).read_bytes() for name in before} == before


def test_graders_differ_in_what_is_equal(scored, tmp_path):
    for grader, accuracy in (("exact", 0.5), ("prm800k", 1.0), ("none", 1.0)):
        out = tmp_path / grader
        assert run(f"--input={scored}", "--n=2", f"--grader={grader}", f"--output_dir={out}") == 0
        found = results(out)
        assert found["config"]["grader"] == found["grading"]["grader"] == grader
        assert {r["accuracy"] for r in found["rows"] if r["aggregation"] == "last"} == {accuracy}


def test_two_systems(scored, tmp_path, capsys):
    swapped = [
        {**r, "candidates": [{**c, "step_scores": [1 - s for s in c["step_scores"]]} for c in r["candidates"]]}
        for r in reversed(ROWS)
    ]
    other = write(tmp_path / "other.jsonl", swapped)
    out = tmp_path / "out"
    arguments = ["--n=2", "--grader=none", "--aggregation=last", "--name=one", "--name2=two", f"--output_dir={out}"]
    assert run(f"--input={scored}", f"--input2={other}", *arguments) == 0
    found = results(out)
    assert found["systems"] == ["one", "two"]
    best = next(r for r in found["comparison"] if r["method"] == "best_of_n")
    assert (best["accuracy"], best["accuracy2"], best["difference"], best["ci95"]) == (1.0, 0.0, 1.0, [1.0, 1.0])
    assert {"n", "aggregation", "p_value"} < set(best)
    assert "one minus two on the same questions" in capsys.readouterr().out
    write(other, swapped[:1])
    assert run(f"--input={scored}", f"--input2={other}", *arguments) == 2
    assert "--input2 has no question 'a', which scored.jsonl:1 has" in capsys.readouterr().err


def test_several_inputs_are_several_data_sets(tmp_path, capsys):
    one = write(tmp_path / "first.jsonl", ROWS)
    two = write(tmp_path / "second.jsonl.gz", [{**r, "dataset": "named"} for r in ROWS])
    out = tmp_path / "out"
    assert run(f"--input={one},{two}", "--n=2", "--grader=none", f"--output_dir={out}") == 0
    found = results(out)
    assert found["datasets"] == ["first", "named"] and found["questions"] == 4
    assert [(p["by"], p["value"], p["questions"]) for p in found["parts"]] == [
        ("dataset", "first", 2),
        ("dataset", "named", 2),
    ]
    # Shards of one pattern are one data set, and a question in two of them is a mistake.
    assert run(f"--input={tmp_path}/first.json*,{one}", "--n=2", "--grader=none", f"--output_dir={out}") == 2
    assert "\"id\" 'a' was already that of first.jsonl:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n=2,4"], "--n=4: question 'a' has only 2 candidates"),
        (["--n=0"], "--n: '0' is not a whole number from 1"),
        (["--n=two"], "--n: 'two' is not a whole number from 1"),
        (["--n="], "--n is empty"),
        (["--n=2,2"], "--n=2,2 "),
        (["--n=2", "--aggregation=median"], "--aggregation=median is not among: min, last, product, mean"),
        (["--n=2", "--grader=guess"], "grader"),
        (["--n=2", "--draws=-1"], "draws"),
        (["--n=2", "--name=a", "--name2=a"], "--name and --name2 are both 'a'"),
        (["--n=2", "--name2=b"], "--name2=b is for comparisons with --input2"),
        (["--n=2", "--reward_parameters=7"], "--reward_parameters=7 is for comparisons with --input2"),
        (["--n=2", "--grade_seconds=1"], "--grade_seconds=1 is for --grader=math_verify and prm800k, not none"),
        (["--n=2", "--input="], "--input is empty"),
        (["--n=2", "--output_dir="], "--output_dir is empty"),
        (["--n=2", "--input=nothing.jsonl"], "nothing.jsonl: no such file"),
        (["--n=2", "--input2=nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(scored, tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert run(f"--input={scored}", f"--output_dir={out}", "--grader=none", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not out.exists()


def test_a_directory_that_holds_something_else_is_left_alone(scored, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert run(f"--input={scored}", "--n=2", f"--output_dir={out}") == 2
    assert f"--output_dir={out} contains" in capsys.readouterr().err
    assert (out / "config.json").read_text() == "{}"


def test_what_is_not_needed_is_not_imported(scored):
    # Training ends with this, and grading by the candidates' own word needs neither sympy nor a picture.
    code = (
        "import sys; from cfprm_jax.evaluation.options import BonConfig; from cfprm_jax.report import best_of_n; "
        f"best_of_n.evaluate(best_of_n.read(['{scored}']), BonConfig(n=('2',), grader='none', resamples=100)); "
        "print([name for name in ('jax', 'sympy', 'math_verify', 'matplotlib') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
