"""--grid=real on a tiny model: the figures of train, score and process_bench, resume, one cache, bad input."""

from __future__ import annotations

import json
import random
import re

import jax
import numpy as np
import pytest
from documented_keys import check as check_keys
from scipy import stats
from tiny_runs import rows, write_corpus, write_model, write_weights

from cfprm_jax import experiment, flags, process_bench, score, train
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.first_error import LabelledSolution, accuracies
from cfprm_jax.experiments import options, real_metrics, real_report
from cfprm_jax.experiments.cell import first_n
from cfprm_jax.experiments.grid import Cell
from cfprm_jax.experiments.real import real_cells, what
from cfprm_jax.experiments.real_data import EvaluationSets, HeldOut, Record
from cfprm_jax.experiments.real_metrics import Bootstrap, Metric
from cfprm_jax.experiments.real_runner import RealRunner
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.run.evaluation import auroc, binary_metrics
from cfprm_jax.sharding import rules

SIZES = (2, 3)


def write_files(directory) -> None:
    """A model of three layers, corpora, a pool and a subset of ProcessBench."""
    write_model(directory / "model")
    path = directory / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    write_weights(directory / "model")
    write_corpus(directory / "train.jsonl", 10)
    write_corpus(directory / "heldout.jsonl", 7)
    rng = random.Random(1)
    solutions = [[f"{rng.randint(1, 99)}+{q}" for _ in range(rng.randint(1, 4))] for q in range(24)]
    with (directory / "pool.jsonl").open("w") as file:
        for q in range(6):
            own = [{"steps": solutions[4 * q + k], "correct": rng.random() < 0.5} for k in range(4)]
            file.write(json.dumps({"id": q, "question": f"How much is {q}?", "answer": "1", "candidates": own}) + "\n")
    with (directory / "bench.jsonl").open("w") as file:
        for q, steps in enumerate(solutions):
            label = rng.randint(-1, len(steps) - 1)
            file.write(
                json.dumps({"id": f"tiny-{q}", "problem": f"Why {q % 9}?", "steps": steps, "label": label}) + "\n"
            )


def arguments(directory, *more: str) -> list[str]:
    return [
        *("experiment", "--grid=real", f"--model={directory / 'model'}", f"--output_dir={directory / 'out'}"),
        *(f"--train_data={directory / 'train.jsonl'}", f"--heldout_data={directory / 'heldout.jsonl'}"),
        *(f"--pool={directory / 'pool.jsonl'}", f"--process_bench={directory / 'bench.jsonl'}"),
        *("--rows=bce", "--real_treatments=each_once,c2", "--seeds=0", "--n=2,3", "--subsets=first"),
        *("--train_records=8", "--heldout_records=6", "--pool_questions=5", "--process_bench_solutions=20"),
        *("--frozen_layers=2", f"--cache_frozen={directory / 'trunk'}", "--batch_tokens=160", "--row_length=256"),
        *("--dtype=float32", "--remat=none", "--learning_rate=0.001", "--max_length=128", "--system_prompt=Score."),
        *("--resamples=200", f"--data_cache_dir={directory / 'corpora'}"),
        # Cells that run again, here and as runs of train, have the same programs.
        f"--compile_cache_dir={directory / 'compiled'}",
        *more,
    ]


def run(directory, *more: str) -> int:
    return experiment.main(flags.parse(options.ExperimentConfig, arguments(directory, *more)))


@pytest.fixture(scope="module")
def done(one_device, tmp_path_factory):
    directory = tmp_path_factory.mktemp("real")
    write_files(directory)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *text, **_: lines.append(" ".join(map(str, text))))
        assert run(directory) == 0
    (directory / "log.txt").write_text("\n".join(lines))
    return directory


def results(directory):
    return json.loads((directory / "out" / "results.json").read_text())


def by_hand(directory, cell="bce.c2.0", out="out"):
    """The run of train of a cell, and the metrics of its last evaluation."""
    target = directory / f"{out}_by_hand"
    if not target.exists():
        given = f"--flagfile={directory / out / 'cells' / 'real' / cell / 'train.flags'}"
        held_out = directory / "six.jsonl"
        held_out.write_text("".join((directory / "heldout.jsonl").read_text().splitlines(True)[: 6 * 3]))
        more = [f"--eval_data={held_out}", "--eval_max_trajectories=0", f"--output_dir={target}"]
        assert train.main(flags.parse(train.TrainConfig, ["train", given, *more])) == 0
    return target


def test_a_cell_is_train_and_its_evaluation(done):
    metrics = [row for row in rows(by_hand(done)) if "eval_distinct_auroc" in row][-1]
    group = next(g for g in results(done)["groups"] if g["treatment"] == "c2")
    assert group["metrics"]["AUROC"]["mean"] == pytest.approx(metrics["eval_distinct_auroc"], abs=1e-9)
    assert group["metrics"]["negative F1"]["mean"] == pytest.approx(metrics["eval_distinct_negative_f1"], abs=1e-9)


def test_a_cell_with_adapters_is_train_and_its_evaluation(done):
    """Above the frozen layers, from the same cache."""
    more = [f"--output_dir={done / 'adapted'}", "--lora_rank=2", "--learning_rate=0.01", "--real_treatments=each_once"]
    assert run(done, *more, "--pool=", "--process_bench=") == 0
    metrics = [row for row in rows(by_hand(done, "bce.each_once.0", "adapted")) if "eval_distinct_auroc" in row][-1]
    (group,) = json.loads((done / "adapted" / "results.json").read_text())["groups"]
    assert group["metrics"]["AUROC"]["mean"] == pytest.approx(metrics["eval_distinct_auroc"], abs=1e-9)
    full = next(g for g in results(done)["groups"] if g["treatment"] == "each_once")
    assert group["metrics"]["AUROC"]["mean"] != full["metrics"]["AUROC"]["mean"]


def test_a_cell_from_a_prm_is_train_from_it(done):
    """Its head, marker and texts are those of its prm.json, where no flag names them."""
    network = PRMConfig(loading.read_config(done / "model")[0], head="mlp")
    theirs = EncodingConfig(marker="<|im_end|>", system_prompt="Judge.", max_length=128)
    tokenizer = load_tokenizer(done / "model", theirs.marker)
    params = init_params(network, jax.random.key(0))
    format = "process_reward_model"
    loading.export(done / "prm", params, network, tokenizer, theirs, format=format, dtype="float32")
    given = [flag for flag in arguments(done) if not flag.startswith("--system_prompt")]
    given += [f"--output_dir={done / 'from_prm'}", f"--model={done / 'prm'}", "--frozen_layers=0", "--cache_frozen=off"]
    given += ["--real_treatments=each_once", "--pool=", "--process_bench="]
    assert experiment.main(flags.parse(options.ExperimentConfig, given)) == 0
    cell = done / "from_prm" / "cells" / "real" / "bce.each_once.0" / "train.flags"
    assert {"--head=mlp", "--marker=<|im_end|>", "--system_prompt=Judge."} <= set(cell.read_text().splitlines())
    metrics = [row for row in rows(by_hand(done, cell.parent.name, "from_prm")) if "eval_distinct_auroc" in row][-1]
    (group,) = json.loads((done / "from_prm" / "results.json").read_text())["groups"]
    assert group["metrics"]["AUROC"]["mean"] == pytest.approx(metrics["eval_distinct_auroc"], abs=1e-9)


def test_a_cell_is_score_and_process_bench(done):
    checkpoint = f"--checkpoint={by_hand(done)}"
    more = [f"--cache_frozen={done / 'trunk'}", f"--compile_cache_dir={done / 'compiled'}"]
    group = next(g for g in results(done)["groups"] if g["treatment"] == "c2")["metrics"]
    scored = done / "scored.jsonl"
    given = ["score", checkpoint, f"--input={done / 'pool.jsonl'}", f"--output={scored}", *more]
    assert score.main(flags.parse(score.ScoreConfig, given)) == 0
    kept = [json.loads(line) for k, line in enumerate(scored.open()) if k in {0, 1, 2, 3, 4}]  # k * 6 // 5
    rank = np.array([[min(c["step_logits"]) for c in row["candidates"]] for row in kept])
    correct = np.array([[c["correct"] for c in row["candidates"]] for row in kept])
    for place, n in enumerate(SIZES):
        assert group[f"Best-of-{n}"]["mean"] == pytest.approx(
            first_n(rank[:, :3], correct[:, :3], SIZES)[:, place].mean()
        )
    subset = done / "twenty.jsonl"
    lines = (done / "bench.jsonl").read_text().splitlines(True)
    subset.write_text("".join(lines[k * 24 // 20] for k in range(20)))
    given = ["process_bench", checkpoint, f"--input={subset}", f"--output_dir={done / 'bench'}", *more]
    assert process_bench.main(flags.parse(process_bench.ProcessBenchConfig, given)) == 0
    f1 = json.loads((done / "bench" / "results.json").read_text())["subsets"]["tiny"]["f1"]
    assert group["ProcessBench tiny F1"]["mean"] == pytest.approx(f1, abs=1e-12)


def test_as_many_tokens_and_steps(done):
    config = flags.parse(options.ExperimentConfig, arguments(done, "--train_tokens_per_seed=600"))
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    runner = RealRunner(done / "drawn", options.base_options(config), config.real, SIZES, mesh, log=lambda _: None)
    loaders, tokens = {}, {}
    for treatment in ("expanded", "each_once", "c2", "plain_matched"):
        given = runner.train_config(Cell("real", "bce", treatment, 5))
        loader = runner.loader(given)
        steps = min(given.run.max_steps or loader.num_steps, loader.num_steps)
        loaders[treatment] = (steps, given.packing.packing, given.loss.label_weight)
        tokens[treatment] = sum(loader.batch(step).tokens_computed for step in range(steps))
    assert tokens["each_once"] <= 600 < tokens["each_once"] + 200, "the records of a seed"
    assert tokens["expanded"] == pytest.approx(tokens["each_once"], abs=160)
    assert loaders["c2"][0] == loaders["plain_matched"][0] >= 2 * loaders["each_once"][0] - 1
    assert loaders["expanded"][1:] == ("sequence", "trajectory") and loaders["c2"][1:] == ("tree", "node")


def test_the_report(done):
    check_keys("results.json of experiment --grid=real", results(done))
    assert [(d["treatment"], d["than"]) for d in results(done)["differences"]] == [("c2", "each_once")]
    runs = {g["treatment"]: g["runs"][0] for g in results(done)["groups"]}
    assert runs["c2"]["tokens"] > 1.8 * runs["each_once"]["tokens"]
    text = (done / "out" / "real.md").read_text()
    assert "2 of 2 cells" in text and "BCE, C=2, then 1 against each label once (1 seed): " in text
    assert (done / "out" / "real.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_frozen_is_computed_once(done):
    """Once for each of two granularities and three sets, and stored once."""
    log = (done / "log.txt").read_text()
    assert len(re.findall(r"frozen      computing 2 layers of [\d,]+ distinct tokens", log)) == 2 + 3
    units = json.loads((done / "trunk" / "index.json").read_text())["content"]
    assert (done / "trunk" / "hidden.bin").stat().st_size == sum(n for _, n, _ in units.values()) * 16 * 4


def test_resume(done, capsys):
    cells = done / "out" / "cells" / "real"
    before = {path: path.read_bytes() for path in cells.glob("*/result.npz")}
    size = (done / "trunk" / "hidden.bin").stat().st_size
    text = (done / "out" / "real.md").read_text()
    assert run(done) == 0
    assert {path: path.read_bytes() for path in cells.glob("*/result.npz")} == before
    assert (done / "out" / "real.md").read_text() == text
    again = cells / "bce.each_once.0" / "result.npz"
    again.unlink()
    capsys.readouterr()
    assert run(done) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("cell ")] == [
        "real/bce.each_once.0:"
    ]
    with np.load(again) as stored:
        own = {name: stored[name] for name in stored.files}
    again.write_bytes(before[again])
    with np.load(again) as stored:
        for name in stored.files:
            if name != "summary":
                np.testing.assert_array_equal(own[name], stored[name])
        first, second = (json.loads(str(x["summary"]))["parameters_sha256"] for x in (own, stored))
    assert first == second
    assert (done / "trunk" / "hidden.bin").stat().st_size == size


def test_subsets_that_are_named_after_files(done, capsys):
    """A file of another name is another subset, whose cells are run again; ids that name a subset need no file name."""
    folder = done / "subsets"
    folder.mkdir()
    bench = [json.loads(line) for line in (done / "bench.jsonl").open()]

    def ran(name: str, rows) -> list[str]:
        for path in folder.glob("*.jsonl"):
            path.unlink()
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = [f"--output_dir={folder / 'out'}", "--real_treatments=each_once", "--heldout_data=", "--pool="]
        capsys.readouterr()
        assert run(done, *more, f"--process_bench={folder / name}") == 0
        (group,) = json.loads((folder / "out" / "results.json").read_text())["groups"]
        cells = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cell ")]
        return [name for name in group["metrics"] if name.startswith("ProcessBench")] + ["ran"] * len(cells)

    assert ran("first.jsonl", bench) == ["ProcessBench tiny F1", "ran"]
    assert ran("other.jsonl", bench) == ["ProcessBench tiny F1"]
    numbered = [{**row, "id": place} for place, row in enumerate(bench)]
    assert ran("first.jsonl", numbered) == ["ProcessBench first F1", "ran"]
    assert ran("other.jsonl", numbered) == ["ProcessBench other F1", "ran"]
    assert ran("other.jsonl", numbered) == ["ProcessBench other F1"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--frozen_layers=9", "--frozen_layers=9: the backbone has 3 layers"),
        ("--frozen_layers=0", "--cache_frozen needs --frozen_layers"),
        ("--model=synthetic", "--model is missing"),
        ("--n=", "--n is empty"),
        ("--heldout_data=absent.jsonl", "absent.jsonl"),
        ("--pool=absent.jsonl", "absent.jsonl"),
        ("--process_bench=absent.json", "absent.json"),
        ("--cache_frozen=off", "needs --cache_frozen"),
        ("--batch_tokens=0", "needs --batch_tokens"),
        ("--train_records=11", "10 of 10 records can be chosen, fewer than --train_records=11; 0 is all of them"),
        ("--heldout_records=8", "7 of 7 records can be chosen, fewer than --heldout_records=8; 0 is all of them"),
        ("--record_tokens=30", r"have more distinct tokens than --record_tokens=30\), fewer than --train_records=8"),
        ("--pool_questions=7", "--pool_questions=7: --pool=.*pool.jsonl has 6 questions; 0 is all of them"),
        (
            "--process_bench_solutions=25",
            "=25: the subset 'tiny' of --process_bench=.*bench.jsonl has 24 solutions; 0 is all of them",
        ),
        ("--n=2,5", "pool.jsonl:1: 4 candidates, but --n=5 needs as many"),
        ("--train_data=laboratory", "--grid=real needs --train_data"),
        ("--seeds=0,0", "names something twice"),
    ],
)
def test_bad_input(done, flag, message):
    with pytest.raises(UserError, match=message):
        run(done, f"--output_dir={done / 'bad'}", flag)


@pytest.mark.parametrize("flag", ["--frozen_layers=2", "--lora_rank=2"])
def test_frozen_layers_and_adapters_are_for_this_grid(flag):
    with pytest.raises(UserError, match=f"{flag} is for --grid=real"):
        experiment.main(flags.parse(options.ExperimentConfig, ["experiment", "--output_dir=o", flag]))


def test_the_grid():
    grid = real_cells(("orm", "bce"), ("expanded", "plain_matched"), (3, 1))
    assert [cell.name for cell in grid] == [
        *("real/orm.expanded.3", "real/bce.expanded.3", "real/bce.plain_matched.3"),
        *("real/orm.expanded.1", "real/bce.expanded.1", "real/bce.plain_matched.1"),
    ]


def test_weighted_metrics_are_those_of_repeated_units():
    rng = np.random.default_rng(0)
    unit = rng.integers(0, 6, 60)
    z, labels = rng.integers(-2, 3, 60).astype(float), (rng.random(60) < 0.6).astype(float)
    weights = rng.multinomial(6, np.full(6, 1 / 6), 20).astype(float)
    ranked = real_metrics.weighted_auroc(z, labels > 0.5, unit, weights)
    f1 = real_metrics.weighted_negative_f1(z, labels > 0.5, unit, weights)
    for row, one, other in zip(weights, ranked, f1, strict=True):
        index = np.repeat(np.arange(60), row[unit].astype(int))
        assert one == pytest.approx(auroc(z[index], labels[index] > 0.5))
        assert other == pytest.approx(binary_metrics(z[index], labels[index])["negative_f1"])
    right, wrong = rng.random(6) < 0.5, np.array([True, True, True, False, False, False])
    found = real_metrics.weighted_process_f1(right.astype(float), wrong, weights)
    for row, value in zip(weights, found, strict=True):
        index = np.repeat(np.arange(6), row.astype(int))
        expected = accuracies(
            [LabelledSolution(np.array([0.0 if right[i] == wrong[i] else 1.0]), 0 if wrong[i] else -1) for i in index],
            0.5,
        ).f1
        assert np.isnan(value) if expected is None else value == pytest.approx(expected)


def tree_records(rng, count):
    """Records whose trajectories share steps, each distinct step with a label of its own, some without one."""
    records = []
    for number in range(count):
        known: dict[tuple[str, ...], float] = {}
        trajectories = []
        for _ in range(12):
            steps = tuple(f"step {rng.integers(3)}" for _ in range(rng.integers(1, 4)))
            labels = [known.setdefault(steps[: k + 1], rng.choice([0.0, 1.0, np.nan])) for k in range(len(steps))]
            trajectories.append(Trajectory(f"question {number}", steps, np.array(labels, np.float32), "t", str(number)))
        records.append(Record(trajectories, 0))
    return records


def test_siblings_are_right_and_wrong_steps_after_the_same_steps():
    rng = np.random.default_rng(5)
    records = tree_records(rng, 12)
    held_out = HeldOut.of(records)
    texts = [
        (held_out.items[i][0], held_out.items[i][1][: k + 1]) for i, k in zip(held_out.item, held_out.step, strict=True)
    ]
    expected = {
        (a, b)
        for a, (question, steps) in enumerate(texts)
        for b, (other, others) in enumerate(texts)
        if question == other and steps[:-1] == others[:-1] and held_out.label[a] == 1 and held_out.label[b] == 0
    }
    assert len(expected) > 10 and {tuple(pair) for pair in held_out.siblings.tolist()} == expected
    assert len(held_out.siblings) == len(expected)
    metric = {one.name: one for one in real_metrics.metrics(EvaluationSets(held_out, None, []), [], "min", "all")}
    weights = rng.multinomial(12, np.full(12, 1 / 12), 10).astype(float)
    z = rng.integers(-2, 3, len(texts)).astype(float)
    found = metric["sibling AUROC"].value({"held_out/logits": z}, weights)
    for row, value in zip(weights, found, strict=True):
        wins = [(row[held_out.record[a]], (z[a] > z[b]) + (z[a] == z[b]) / 2) for a, b in expected]
        assert value == pytest.approx(sum(w * won for w, won in wins) / sum(w for w, _ in wins))
    # What depends on the question and the steps before does not matter to siblings, and does to all steps.
    of_prefix = {key: rng.normal() for key in sorted({(question, steps[:-1]) for question, steps in texts})}
    moved = {"held_out/logits": z + 9 * np.array([of_prefix[question, steps[:-1]] for question, steps in texts])}
    np.testing.assert_allclose(metric["sibling AUROC"].value(moved, weights), found)
    assert metric["AUROC"].value(moved, weights[:1]) != metric["AUROC"].value({"held_out/logits": z}, weights[:1])
    earlier = {"held_out/logits": -held_out.step.astype(float)}
    assert metric["AUROC"].value(earlier, np.ones((1, 12)))[0] == real_metrics.position_auroc(held_out)
    assert metric["sibling AUROC"].value(earlier, np.ones((1, 12)))[0] == 0.5
    assert real_metrics.position_correlation(held_out, earlier) == pytest.approx(-1)
    one_missing = {"held_out/logits": np.where(np.arange(len(z)) == 3, np.nan, z)}
    kept = np.arange(len(z)) != 3
    expected_correlation = stats.spearmanr(z[kept], held_out.step[kept]).statistic
    assert real_metrics.position_correlation(held_out, one_missing) == pytest.approx(expected_correlation)
    assert real_metrics.position_correlation(held_out, {"held_out/logits": np.zeros(len(z))}) is None


def test_records_without_siblings_have_no_such_metric():
    one = Trajectory("q", ("a", "b"), np.array([1, 0], np.float32), "t", "1")
    held_out = HeldOut.of([Record([one], 0)])
    assert held_out.siblings.shape == (0, 2)
    known = real_metrics.metrics(EvaluationSets(held_out, None, []), [], "min", "all")
    assert [metric.name for metric in known] == ["AUROC", "negative F1", "first error"]


def test_intervals_are_paired():
    """A constant difference has no width, however much records and seeds differ."""
    rng = np.random.default_rng(1)
    metric = Metric("x", "record", 30, lambda arrays, weights: real_metrics.weighted_mean(arrays["x"], weights))
    bootstrap = Bootstrap(500)
    ones = [{"x": rng.normal(size=30)} for _ in range(3)]
    one = bootstrap.table(metric, ones)
    other = bootstrap.table(metric, [{"x": own["x"] - 0.25} for own in ones])
    found = bootstrap.difference(metric, one - other)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25)) and found.sign == 1
    alone = bootstrap.difference(metric, one)
    assert alone.low < alone.mean < alone.high and alone.high - alone.low > 0.1


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize(("of_seeds", "of_records"), [(3.0, 0.1), (0.3, 3.0), (0.1, 0.1)])
def test_intervals_cover(seeds, of_seeds, of_records):
    """Two or three seeds are few: an interval that resamples them covers 56 or 72 %."""
    rng = np.random.default_rng(3)
    metric = Metric("x", "record", 100, lambda arrays, weights: real_metrics.weighted_mean(arrays["x"], weights))
    bootstrap, covered, runs = Bootstrap(400), 0, 300
    for _ in range(runs):
        records = rng.normal(0, of_records, 100)
        arrays = [{"x": rng.normal(0, of_seeds) + records + rng.normal(size=100)} for _ in range(seeds)]
        found = bootstrap.difference(metric, bootstrap.table(metric, arrays))
        covered += found.low <= 0 <= found.high
    assert covered / runs >= 0.92


def test_one_seed_is_about_records_alone():
    rng = np.random.default_rng(4)
    metric = Metric("x", "record", 200, lambda arrays, weights: real_metrics.weighted_mean(arrays["x"], weights))
    bootstrap, x = Bootstrap(4000), rng.random(200)
    found = bootstrap.metric(metric, bootstrap.table(metric, [{"x": x}]))
    half = stats.t.ppf(0.975, 199) * x.std() / np.sqrt(200)
    assert (found.low, found.high) == pytest.approx((x.mean() - half, x.mean() + half), rel=0.01)


def test_a_metric_stays_between_0_and_1():
    metric = Metric("x", "record", 20, lambda arrays, weights: real_metrics.weighted_mean(arrays["x"], weights))
    bootstrap, x = Bootstrap(200), np.eye(20)[0]
    low, high = (bootstrap.metric(metric, bootstrap.table(metric, [{"x": v}])) for v in (x, 1 - x))
    assert low.low == 0 < low.high and high.low < 1 == high.high
    difference = bootstrap.difference(metric, bootstrap.table(metric, [{"x": x}]))
    assert difference.low < 0


def test_sentences_name_what_the_outcome_model_trains_on():
    """Its coarse to fine begins with whole solutions."""
    interval = real_metrics.Interval(0.1, 0.05, 0.15, 0.01, (0.1,))
    groups = [
        real_report.Group("orm", name, what(Cell("real", "orm", name, 0)).title, [], {}, [])
        for name in ("c2", "each_once")
    ]
    difference = real_report.Difference("orm", "c2", "each_once", 1, {"AUROC": interval})
    (found,) = real_report.sentences(real_report.Findings(["AUROC"], groups, [difference]))
    assert found == "ORM, whole, C=2, then 1 against each label once (1 seed): higher: AUROC +10.0 [5.0, 15.0]."
