"""The prm_bench command: published files, scores of an earlier run, a model."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from documented_keys import check as check_keys
from exported_prm import export_random

import cfprm_jax
from cfprm_jax import flags, prm_bench, synthetic
from cfprm_jax.benchmarks.prm_bench import without_number
from cfprm_jax.data.step_cases import CONTROL, PUBLISHED, read_cases
from cfprm_jax.evaluation.case_scores import row_of


def rows(count=4):
    return [
        {
            "original_question": f"q{idx} & <b>",
            "modified_question": f"q{idx}",
            "original_process": ["1. a", "2. b"],
            "modified_process": ["1. a", "2. wrong", "3. b_1 < 2"],
            "error_steps": [] if name == "multi_solutions" else [2 + idx % 2],
            "classification": name,
            "idx": f"prm_{idx}",
        }
        for name in PUBLISHED
        for idx in range(count)
    ]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def files(tmp_path):
    """An input and scores of it, by which every step of the odd cases is judged rightly."""
    source = write(tmp_path / "rows.jsonl", rows())
    rng = np.random.default_rng(0)
    scores = []
    for case in read_cases(source).cases:
        perfect = np.where(np.isin(range(1, len(case.steps) + 1), case.error_steps), 0.1, 0.9)
        drawn = rng.uniform(size=len(case.steps))
        scores.append(row_of(case, {"step_scores": (perfect if int(case.idx[-1]) % 2 else drawn).tolist()}))
    return source, write(tmp_path / "scores.jsonl", scores), scores


def run(*arguments):
    return flags.run(prm_bench.PRMBenchConfig, prm_bench.main, ["prm_bench", "--resamples=100", *arguments])


def test_scores_of_an_earlier_run(files, tmp_path, capsys):
    source, scores, _ = files
    out = tmp_path / "out"
    assert run(f"--scores={scores}", f"--input={source}", f"--output_dir={out}") == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "report.html",
        "results.json",
        "run.flags",
        "table.md",
        "table.tex",
    ]
    results = json.loads((out / "results.json").read_text())
    check_keys("results.json of prm_bench", results)
    lines = {line["name"]: line for line in results["prm_bench"]["lines"]}
    assert results["counts"]["cases"] == 36 and results["counts"]["controls"] == 4
    # All of these cases have scores, but they are not all that were published.
    assert lines["pooled"]["prm_score"] is not None and results["prm_bench"]["overall"] is None
    table = (out / "table.md").read_text()
    assert "Incomplete: 36 of the 6,211 published cases" in table and "| NR redundency" in table
    assert "Overall" not in table and "length alone" in table
    assert table in capsys.readouterr().out
    latex = (out / "table.tex").read_text()
    assert r"\multicolumn{4}{c}{Sensitivity}" in latex and latex.count(r"\\") >= 6
    page = (out / "report.html").read_text()
    assert "Content-Security-Policy" in page and "b_1 &lt; 2" in page and "<script" not in page


def test_two_models_and_questions_seen_in_training(files, tmp_path):
    source, scores, found = files
    second = write(tmp_path / "second.jsonl", [{**row, "step_scores": [0.9] * len(row["steps"])} for row in found])
    seen = write(tmp_path / "seen.jsonl", [{"problem": "Q0 & <b>"}])
    out = tmp_path / "out"
    arguments = [f"--scores2={second}", "--name=ours", "--name2=theirs", f"--exclude_questions={seen}"]
    assert run(f"--scores={scores}", f"--input={source}", f"--output_dir={out}", *arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["excluded"] == {"questions": 1, "files": {"rows.jsonl": {"cases": 36, "excluded": 9}}}
    pooled = next(entry for entry in results["comparison"] if entry["name"] == "pooled")
    lines = {line["name"]: line for line in results["prm_bench"]["lines"]}
    assert pooled["prm_score"] == lines["pooled"]["prm_score"]
    assert pooled["prm_score2"] == pytest.approx(lines["pooled"]["baselines"]["all_valid"])
    table = (out / "table.md").read_text()
    assert "ours against theirs" in table and "PRMScore, new questions" in table
    assert "theirs" in (out / "table.tex").read_text() and results["counts"]["missing2"] == 0
    write(second, [{**row, "step_scores": [0.9] * len(row["steps"])} for row in found[3:]])
    again = [f"--scores={scores}", f"--input={source}", f"--output_dir={tmp_path / 'again'}", *arguments]
    assert run(*again) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text())["counts"]["missing2"] == 3
    text = (tmp_path / "again" / "table.md").read_text()
    assert "3 cases have no scores of theirs; the comparison is without them." in text


def test_missing_and_doubled_rows_leave_no_overall_score(files, tmp_path):
    source, scores, found = files
    write(source, rows() + rows()[:2])
    write(scores, [row for row in found if row["classification"] != "circular" or row["idx"] != "prm_2"] + found[:1])
    out = tmp_path / "out"
    assert run(f"--scores={scores}", f"--input={source}", f"--output_dir={out}") == 0
    results = json.loads((out / "results.json").read_text())
    lines = {line["name"]: line for line in results["prm_bench"]["lines"]}
    assert lines["pooled"]["prm_score"] is None and lines["simplicity"]["prm_score"] is None
    assert lines["circular"]["scored"] == 3
    table = (out / "table.md").read_text()
    assert "1 of 36 cases have no scores, such as circular prm_2." in table
    assert "2 doubled cases were left out, such as rows.jsonl:37, the case of rows.jsonl:1." in table
    assert "1 doubled rows of scores were left out." in table and "3 of 4" in table


def test_reason_eval_by_the_same_command(tmp_path):
    lines = [
        {"id": n, "question": f"q{n}", "model_output_step_format": [["a"], ["b", "c"]], "rating": [1, n % 2]}
        for n in range(6)
    ]
    source = write(tmp_path / "mr.json", lines)
    scores = []
    for case in read_cases(source).cases:
        redundant = [0.1, 0.1, 0.3 if case.error_steps else 0.1]
        scores.append(row_of(case, {"step_scores": [0.9, 0.9, 0.8], "step_redundancy": redundant}))
    out = tmp_path / "out"
    arguments = [f"--scores={write(tmp_path / 's.jsonl', scores)}", f"--input={source}"]
    assert run(*arguments, f"--output_dir={out}") == 0
    results = json.loads((out / "results.json").read_text())
    assert results["prm_bench"] is None
    refused = f"--output_dir={tmp_path / 'refused'}"
    assert run(*arguments, f"--scores2={tmp_path / 's.jsonl'}", refused) == 2  # it has no comparison
    (line,) = results["reason_eval"]
    assert line["name"] == "mr" and line["signal"] == "redundancy"
    assert line["step"]["auc"] == line["step"]["macro_f1"] == line["solution"]["auc"] == 1
    assert results["diagnostics"]["lowest_at_last"] == 1
    assert "| mr " in (out / "table.md").read_text() and "ReasonEval" in (out / "table.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scores="], "--checkpoint (a run of train)"),
        (["--model=a"], "--checkpoint (a run of train)"),
        (["--input="], "--input is empty"),
        (["--output_dir="], "--output_dir is empty"),
        (["--name=a", "--name2=a"], "--name and --name2 are both 'a'"),
        (["--name2=b"], "--name2=b is for comparisons with --scores2"),
        (["--strip_numbers=never"], "--strip_numbers=never is for scoring with --model or --checkpoint"),
        (["--dtype=float32"], "--dtype=float32 is for scoring with --model or --checkpoint"),
        (["--threshold=2"], "threshold"),
        (["--scores=missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(files, tmp_path, capsys, arguments, message):
    source, scores, _ = files
    out = tmp_path / "out"
    assert run(f"--scores={scores}", f"--input={source}", f"--output_dir={out}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not out.exists()


def test_scores_of_another_file_are_refused_before_anything_is_written(files, tmp_path, capsys):
    source, scores, found = files
    write(scores, [*found[:3], {**found[3], "steps": ["x"] * len(found[3]["steps"])}])
    out = tmp_path / "out"
    assert run(f"--scores={scores}", f"--input={source}", f"--output_dir={out}") == 2
    error = capsys.readouterr().err
    assert 'scores.jsonl:4: "steps" ' in error and "rows.jsonl:" in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("steps", "how", "seen"),
    [
        (["1. a", "Step 2. b", " 3.c"], "auto", ["a", "b", "c"]),
        (["1. a", "b"], "auto", ["1. a", "b"]),
        (["1. a", "b"], "always", ["a", "b"]),
        (["1. a", "2. b"], "never", ["1. a", "2. b"]),
        (["3.5 is", "4. b"], "always", ["3.5 is", "b"]),
    ],
)
def test_numbers_before_steps(steps, how, seen):
    assert without_number(steps, how) == seen


def test_a_model_scores_the_cases(tmp_path_factory, monkeypatch):
    tmp_path = tmp_path_factory.mktemp("model")
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    world = synthetic.materialise(
        tmp_path / "world",
        0,
        synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2),
    )
    export_random(world.model, tmp_path / "prm")
    questions = [json.loads(line) for line in world.candidates.read_text().splitlines()]
    lines = []
    for question in questions:
        steps = question["candidates"][0]["steps"]
        made = {"original_question": question["question"], "modified_question": question["question"]}
        made |= {"original_process": steps, "modified_process": [f"{n}. {step}" for n, step in enumerate(steps, 1)]}
        lines.append({**made, "error_steps": [1], "classification": "redundency", "idx": str(question["id"])})
    lines.append({**lines[0], "classification": "circular", "modified_process": lines[0]["original_process"] * 40})
    source = write(tmp_path / "rows.jsonl", lines)
    out = tmp_path / "out"
    assert run(f"--model={tmp_path / 'prm'}", "--dtype=float32", f"--input={source}", f"--output_dir={out}") == 0
    scored = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert len(scored) == 2 * len(questions) + 1 and scored[-1]["step_scores"] is None
    assert json.loads((out / "results.json").read_text())["counts"]["unscored"] == 1
    reference = cfprm_jax.load(tmp_path / "prm")
    for control, case in zip(scored[0:-1:2], scored[1:-1:2], strict=True):
        assert control["classification"] == CONTROL and case["steps"][0].startswith("1. ")
        # The numbers are not read, so both are the same to the model.
        assert control["step_scores"] == case["step_scores"]
        expected = reference.score(control["question"], control["steps"])
        np.testing.assert_allclose(control["step_scores"], expected, rtol=1e-5)
    again = tmp_path / "again"
    assert run(f"--scores={out / 'scores.jsonl'}", f"--input={source}", f"--output_dir={again}") == 0
    first, second = (json.loads((path / "results.json").read_text()) for path in (out, again))
    assert first["prm_bench"] == second["prm_bench"]
