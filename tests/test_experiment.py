"""The experiment command on a small grid: what it writes, that it resumes, and that a cell is train, score and bon."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from documented_keys import check as check_keys
from exported_prm import export_random
from tiny_runs import write_model

from cfprm_jax import bon, experiment, flags, score, train
from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.experiments import options, run
from cfprm_jax.runtime import config_files
from cfprm_jax.synthetic import judge

pytestmark = pytest.mark.compile_once

ROOT = pathlib.Path(__file__).resolve().parents[1]
GRID = [
    f"--flagfile={ROOT / 'configs' / 'lab' / 'base.flags'}",
    "--rows=bce,q_ranking",
    "--seeds=0,1",
    "--n=4,8",
    "--subsets=first",
    "--batch_size=16",
]
TABLE = [
    "--treatments=plain,plain_matched,c2",
    "--grouping_rows=q_ranking",
]
LABORATORY = [
    "--levels=some,none",
    "--other_level_treatments=plain_matched,c2",
    "--demonstrations=4800",
    "--train_problems=12",
    "--solutions_per_problem=8",
    "--test_questions=8",
    "--candidates=8",
]


def configure(directory, *more):
    # Cells that run again, here and as runs of train, have the same programs.
    caches = [f"--data_cache_dir={directory / 'data'}", f"--compile_cache_dir={directory / 'compiled'}"]
    return flags.parse(
        options.ExperimentConfig,
        ["experiment", *GRID, *TABLE, *LABORATORY, f"--output_dir={directory / 'out'}", *caches, *more],
    )


@pytest.fixture(scope="module")
def done(one_device, tmp_path_factory):
    directory = tmp_path_factory.mktemp("experiment")
    assert experiment.main(configure(directory)) == 0
    return directory


def cell_files(directory):
    return sorted((directory / "out" / "cells").glob("*/*/result.npz"))


def test_everything_is_written(done):
    out = done / "out"
    assert len(cell_files(done)) == 2 * (2 * 3 + 4 + 2 * 2)
    results = json.loads((out / "results.json").read_text())
    check_keys("results.json of experiment", results)
    assert results["seeds"] == [0, 1] and set(results["tests"]) == {"some", "none"}
    rows = {(a["level"], a["row"], a["treatment"]) for a in results["accuracies"]}
    assert ("some", "q_ranking", "grouped") in rows and ("none", "bce", "c2") in rows
    steps = {(a["row"], a["treatment"]): a["steps"] for a in results["accuracies"] if a["level"] == "some"}
    assert steps["bce", "plain"] == 6 and steps["bce", "c2"] == steps["bce", "plain_matched"] == 12
    assert steps["q_ranking", "plain_compute"] < steps["q_ranking", "grouped"] == 6
    keys = {family["key"] for family in results["families"]}
    assert keys == {
        "paper",
        "steps",
        "windows",
        "windows_none",
        "grouping",
        "grouping_4",
        "grouping_compute",
        "grouping_4_compute",
    }
    table = (out / "table2.md").read_text()
    assert "| some       | BCE + CFPRM" in table and "short @4" in table and "long Avg." in table
    assert (out / "table2.tex").read_text().count(r"\\") >= 6
    text = (out / "findings.md").read_text()
    assert "paired by seed (2) and question" in text and "(The paper's comparison.)" in text
    assert (out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert "# Treatments" in (out / "controls.md").read_text()


def test_the_laboratorys_data(done):
    questions = {}
    for level in ("some", "none"):
        folder = done / "out" / "laboratory" / level
        tests = {t: [json.loads(line) for line in (folder / f"{t}.jsonl").open()] for t in ("short", "long")}
        questions[level] = {t: [row["question"] for row in rows] for t, rows in tests.items()}
        assert all(len(row["candidates"]) == 8 for rows in tests.values() for row in rows)
        for row in (*tests["short"], *tests["long"]):
            problem = judge.parse_problem(row["question"])
            for candidate in row["candidates"]:
                found = judge.judge(problem, candidate["steps"])
                assert candidate["labels"] == list(found.labels)
                assert candidate["correct"] == (found.answer == problem.answer)
        trained = []
        for seed in (0, 1):
            rows = [json.loads(line) for line in (folder / f"train_{seed}.jsonl").open()]
            assert len(rows) == 12 * 8 and all(len(row["labels"]) == len(row["completions"]) >= 2 for row in rows)
            # Solutions end at their first mistake, or with their second step.
            assert all(False not in row["labels"][:-1] for row in rows if len(row["labels"]) > 2)
            trained.append({row["prompt"] for row in rows})
            assert trained[-1].isdisjoint(questions[level]["short"] + questions[level]["long"])
        assert trained[0] != trained[1]
    assert questions["some"] == questions["none"], "the same questions at every redundancy"


def test_it_resumes_and_cells_come_out_the_same_to_the_bit(done, capsys):
    before = {path: path.read_bytes() for path in cell_files(done)}
    lost = [path for path in before if "q_ranking.c2" in str(path) or "bce.plain.1" in str(path)]
    for path in lost:
        path.unlink()
    assert experiment.main(configure(done)) == 0
    ran = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cell ")]
    assert len(ran) == len(lost) > 2
    assert {path: path.read_bytes() for path in cell_files(done)} == before


def test_other_options_make_other_cells(done):
    grid, materials = run.plan(configure(done))
    from cfprm_jax.experiments.runner import Runner
    from cfprm_jax.runtime import devices
    from cfprm_jax.sharding import rules

    mesh = rules.make_mesh(materials.base.device, devices.select("cpu"))
    runner = Runner(materials, mesh, lambda line: None)
    changed = dataclasses.replace(
        materials.base, optimizer=dataclasses.replace(materials.base.optimizer, learning_rate=3e-3)
    )
    other = Runner(dataclasses.replace(materials, base=changed), mesh, lambda line: None)
    for each in (runner, other):
        for level in ("some", "none"):
            each._prepare(level, [0, 1])
    assert all(runner._load(cell) is not None for cell in grid)
    assert all(other._load(cell) is None for cell in grid)
    assert len({runner.fingerprint(cell) for cell in grid}) == len(grid)


@pytest.mark.parametrize("name", ["some/q_ranking.c2.0", "some/bce.plain_matched.1", "none/q_ranking.c2.1"])
def test_a_cell_is_train_score_and_bon(done, tmp_path, name):
    out = done / "out"
    cell = out / "cells" / name
    run = tmp_path / "run"
    argv = ["train", f"--flagfile={cell / 'train.flags'}", f"--output_dir={run}"]
    assert train.main(flags.parse(train.TrainConfig, argv)) == 0
    summary = json.loads(str(np.load(cell / "result.npz")["summary"]))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in steps if "loss" in line]
    assert len(losses) == summary["steps"]
    assert np.mean(losses[-max(len(losses) // 10, 1) :]) == pytest.approx(summary["final_loss"], rel=1e-6)
    for test in ("short", "long"):
        scored = tmp_path / f"{test}.jsonl"
        candidates = out / "laboratory" / name.split("/")[0] / f"{test}.jsonl"
        assert score.main(score.ScoreConfig(checkpoint=str(run), input=(str(candidates),), output=str(scored))) == 0
        results = tmp_path / f"bon_{test}"
        config = BonConfig(
            input=(str(scored),),
            n=("4", "8"),
            aggregation=AGGREGATIONS,
            grader="none",
            resamples=100,
            output_dir=str(results),
        )
        assert bon.main(config) == 0
        rows = json.loads((results / "results.json").read_text())["rows"]
        for aggregation in AGGREGATIONS:
            accuracies = [r["accuracy"] for r in rows if (r["method"], r["aggregation"]) == ("best_of_n", aggregation)]
            assert accuracies == summary["accuracy"][f"{test}/{aggregation}/first"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--output_dir="], "--output_dir is empty"),
        (["--seeds=a"], "--seeds: 'a' is not a whole number"),
        (["--n=0"], "--n: '0' is not a whole number from 1"),
        (["--n=4,8,4"], "--n=4,8,4 names something twice"),
        (["--n="], "--n is empty: expected whole numbers"),
        (["--seeds="], "--seeds is empty: expected whole numbers"),
        (["--rows="], "--rows, --treatments, .* leave no cell"),
        (["--levels="], "--rows, --treatments, --levels, .* leave no cell"),
        (["--levels=some,some"], "--levels=some,some names something twice"),
        (["--rows=orm", "--treatments=c3"], "--rows, --treatments, .* leave no cell"),
        (["--grid=oracle", "--rows="], "--rows, --levels and --seeds leave no cell"),
        (["--grid=labels", "--levels="], "--rows, --levels and --seeds leave no cell"),
        (["--grid=search", "--rows="], "--rows, --levels and --seeds leave no cell"),
        (["--grid=frontier", "--rows=bce", "--label_weights=question"], "--label_weights and .* leave no cell"),
        (["--grid=frontier", "--rows=orm,bce"], "--rows: 'orm' is not among: bce"),
        (["--cache_frozen=auto"], "--cache_frozen needs --frozen_layers"),
        (["--train_data=x.jsonl", "--tests=a=b"], "--model is missing"),
        (["--tests=a=b"], "--tests: .*--train_data"),
        (["--train_data=x.jsonl"], "--tests is empty"),
        (["--train_data=x.jsonl", "--tests=a"], "'a' is not NAME=FILE"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        run.plan(configure(tmp_path, *more))


@pytest.mark.parametrize("grid", ["frontier", "oracle", "labels", "search"])
def test_the_default_rows_of_a_grid_of_losses(grid):
    config = flags.parse(options.ExperimentConfig, ["experiment", f"--grid={grid}", "--output_dir=o"])
    found, _ = run.plan(config)
    assert {cell.row for cell in found} == {"bce", "mse", "q_ranking"}
    # run.flags, which name the rows, give the same grid.
    assert run.plan(flags.parse(options.ExperimentConfig, ["experiment", *config_files.as_flags(config)]))[0] == found


def test_the_outcome_model_is_refused_where_it_is_asked_for():
    given = ["experiment", "--grid=oracle", "--rows=orm,bce,mse,q_ranking", "--output_dir=o"]
    with pytest.raises(UserError, match="--rows: 'orm' is not among: bce"):
        run.plan(flags.parse(options.ExperimentConfig, given))


def test_a_prm_as_model_is_taken_as_train_takes_it(tmp_path):
    """On data of one's own, where --model is not the laboratory's."""
    write_model(tmp_path / "model")
    prm, data = export_random(tmp_path / "model", tmp_path / "prm"), tmp_path / "data.jsonl"
    data.touch()
    more = [f"--model={prm}", f"--train_data={data}", f"--tests=a={data}", "--marker=<|im_end|>"]
    config = flags.parse(options.ExperimentConfig, ["experiment", *GRID, f"--output_dir={tmp_path / 'out'}", *more])
    with pytest.raises(UserError, match=r"--marker=<\|im_end\|>, but .* was trained with the marker <extra_0>"):
        run.run(config, print)


@pytest.mark.parametrize("grid", ["frontier", "real"])
def test_other_grids_have_their_own_label_weights(tmp_path, grid):
    with pytest.raises(UserError, match=f"--label_weight=node is for --grid=table, not --grid={grid}"):
        run.run(configure(tmp_path, "--label_weight=node", f"--grid={grid}"), print)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--search_n=2", "--search_n=2 is for --grid=search, not --grid=table"),
        ("--grid=search --together=1", "--together=1 is for --grid=frontier, not --grid=search"),
        ("--train_records=5", "--train_records=5 is for --grid=real, not --grid=table"),
        ("--grid=oracle --treatments=c2", "--treatments=c2 is for --grid=table, not --grid=oracle"),
        ("--train_data=a --tests=b=c --candidates=8", "--candidates=8 is for --train_data=laboratory, not data of"),
        ("--train_data=a --tests=b=c --levels=some", "--levels=some is for --train_data=laboratory"),
        ("--levels=some --other_level_treatments=c2", "--other_level_treatments=c2 is for several --levels"),
        ("--rollouts=4", "--rollouts=4 is for --grid=labels, not --grid=table"),
        ("--rows=bce,orm --grouping_rows= --margin=2", "--margin=2 is for rows of q_ranking"),
        (
            "--grid=real --rows=mse --ranking_negatives=question",
            "--ranking_negatives=question is for rows of q_ranking",
        ),
    ],
)
def test_options_without_effect_are_refused(given, message):
    config = flags.parse(options.ExperimentConfig, ["experiment", "--output_dir=o", *given.split()])
    with pytest.raises(UserError, match=message):
        run.run(config, print)


@pytest.mark.parametrize(
    "given",
    [
        "--grid=labels --rollouts=4 --levels=some",
        "--grid=frontier --together=1 --margin=2",
        "--rows=bce --margin=2",  # --grouping_rows has q_ranking
        "--grid=search --treatments=plain,plain_matched,c2,c3,c4,shuffled,fine_to_coarse --train_records=300",
    ],
)
def test_options_with_an_effect_or_at_their_defaults_pass(given):
    options.refuse_unused(flags.parse(options.ExperimentConfig, ["experiment", *given.split()]))


def test_a_laboratory_is_not_mixed_up(done):
    with pytest.raises(UserError, match="test_questions was 8"):
        experiment.main(configure(done, "--test_questions=9"))


def test_the_negatives_of_q_ranking_reach_its_cells(tmp_path):
    _, materials = run.plan(configure(tmp_path, "--rows=q_ranking", "--ranking_negatives=question"))
    assert materials.base.loss.ranking_negatives == "question"


def test_the_flag_files_are_whole_experiments(monkeypatch):
    monkeypatch.chdir("/")  # a flag file means the same from anywhere
    lab = ROOT / "configs" / "lab" / "paper.flags"
    grid, materials = run.plan(flags.parse(options.ExperimentConfig, ["experiment", f"--flagfile={lab}"]))
    assert len(grid) == 245 and sorted({cell.seed for cell in grid}) == [100, 101, 102, 103, 104]
    assert materials.sizes == (8, 16, 32, 64) and materials.laboratory is not None
    small = ROOT / "configs" / "lab" / "small.flags"
    grid, _ = run.plan(flags.parse(options.ExperimentConfig, ["experiment", f"--flagfile={small}"]))
    assert len(grid) == 12
    once = ROOT / "configs" / "lab" / "label_once.flags"
    grid, materials = run.plan(flags.parse(options.ExperimentConfig, ["experiment", f"--flagfile={once}"]))
    assert materials.laboratory is not None and materials.laboratory.corpus == "paths"
    assert {cell.what.label_weight for cell in grid} == {"trajectory", "node"}
    windows = ROOT / "configs" / "lab" / "windows_once.flags"
    grid, materials = run.plan(flags.parse(options.ExperimentConfig, ["experiment", f"--flagfile={windows}"]))
    assert materials.base.loss.label_weight == "node" and {cell.what.label_weight for cell in grid} == {""}
    assert {cell.treatment for cell in grid} == {"plain", "plain_matched", "c2", "fine_to_coarse"}
    real = ROOT / "configs" / "real" / "phase1.flags"
    given = ["--model=m", "--train_data=t.jsonl", "--tests=MATH500=c.jsonl.gz", "--output_dir=o"]
    config = flags.parse(options.ExperimentConfig, ["experiment", f"--flagfile={real}", *given])
    grid, materials = run.plan(config)
    assert len(grid) == 17 and materials.laboratory is None and materials.sizes == (8, 16, 32)
    assert materials.tests == {"MATH500": pathlib.Path("c.jsonl.gz")}
