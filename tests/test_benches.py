"""What the benches share, and the readers of traces and logs."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import runpy
import shutil
import sys
import types
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import safetensors.numpy
from tiny_runs import write_weights

from cfprm_jax.config import ModelConfig, PackingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.tokenizer_files import MARKER, load_tokenizer, marker_id

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The modules of bench/, which are not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    names = ("common", "label_counts", "linear_probe", "marker_embedding", "profile_run", "redundancy_pairs", "startup")
    names += ("traces",)
    yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def test_sides_take_turns(bench: types.SimpleNamespace) -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    given = bench.common.take_turns({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert order == ["a", "b"] * 3
    assert given == {"a": [1, 3, 5], "b": [2, 4, 6]}


def test_json_records_its_origin(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    bench.common.write_json("", figures=1)
    bench.common.write_json(tmp_path / "out.json", "flax", figures=[1, 2])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["figures"] == [1, 2]
    assert {"jax", "numpy", "flax", "python"} == set(written["versions"])
    assert written["machine"]["cpus"] > 0 and written["command"] and written["date"]


def test_the_last_line_of_a_program(bench: types.SimpleNamespace) -> None:
    program = [sys.executable, "-c", "print('words'); print('{\"a\": 1}')"]
    assert bench.common.last_json(program, threads=1) == {"a": 1}
    with pytest.raises(RuntimeError, match="no such thing"):
        bench.common.last_json([sys.executable, "-c", "raise SystemExit('no such thing')"])


def test_counts_of_two_engines_are_compared_step_by_step(bench: types.SimpleNamespace) -> None:
    compare = bench.label_counts.compare
    one = compare({("q", ("s",)): (2, 2)}, {("q", ("s",)): (0, 2)}, 100_000, 0)
    # Of the six ways to deal two successes among four rollouts, two are as far apart: (2 - 1)^2 / (1 / 3).
    assert one["dispersion"] == pytest.approx(3)
    assert one["dispersion_p"] == pytest.approx(1 / 3, abs=0.01)
    assert one["mean_difference"] == 1 and one["mean_difference_p"] == pytest.approx(1 / 3, abs=0.01)
    rng = np.random.default_rng(0)
    keys = [(f"q{number // 4}", ("s",) * (1 + number % 4)) for number in range(2000)]
    rates = rng.random(2000)

    def drawn(rates: np.ndarray) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        return {key: (int(count), 8) for key, count in zip(keys, rng.binomial(8, rates), strict=True)}

    alike = compare(drawn(rates), drawn(rates), 200, 0)
    assert alike["dispersion"] == pytest.approx(1, abs=0.1) and alike["dispersion_p"] > 0.01
    assert alike["ci95"][0] < 0 < alike["ci95"][1]
    # Other rates step by step, equal on the whole.
    other = compare(drawn(rates), drawn(1 - rates), 200, 0)
    assert other["dispersion"] > 2 and other["dispersion_p"] < 0.01


def test_a_probe_weighs_a_step_as_often_as_it_occurs(bench: types.SimpleNamespace) -> None:
    rng = np.random.default_rng(0)
    x, occurrences = rng.normal(size=(80, 5)), rng.integers(1, 9, 80)
    y = (x[:, 0] + rng.normal(size=80) > 0).astype(int)
    found = bench.linear_probe.fit(x, y, occurrences.astype(float), 0.01)
    repeated = bench.linear_probe.fit(
        *(np.repeat(a, occurrences, axis=0) for a in (x, y)), np.ones(occurrences.sum()), 0.01
    )
    np.testing.assert_allclose(found, repeated, atol=1e-3)
    share = occurrences / occurrences.sum()
    residual = share * (1 / (1 + np.exp(-(x @ found[:-1] + found[-1]))) - y)
    np.testing.assert_allclose([*(x.T @ residual + 0.01 * found[:-1]), residual.sum()], 0, atol=1e-5)
    steps = bench.linear_probe.Steps(x, y, occurrences, np.arange(80) // 4)
    weights = bench.linear_probe.weights(steps)
    assert weights["rebalanced"][y == 0].sum() / weights["rebalanced"].sum() == pytest.approx((y == 0).mean())


def test_the_marker_of_a_copy_begins_as_the_separator(bench: types.SimpleNamespace, tiny, tmp_path) -> None:
    model, copy = tmp_path / "model", tmp_path / "copy"
    shutil.copytree(tiny.directory / "model", model)
    write_weights(model)
    config = bench.marker_embedding.MarkerConfig(model=str(model), output_dir=str(copy), step_separator="\n")
    bench.marker_embedding.main(config)
    before, after = (safetensors.numpy.load_file(path / "model.safetensors") for path in (model, copy))
    tokenizer = load_tokenizer(copy)
    (separator,), marker = tokenizer.encode("\n", add_special_tokens=False), marker_id(tokenizer, MARKER)
    table = before["model.embed_tokens.weight"]
    assert not np.array_equal(table[marker], table[separator])
    table[marker] = table[separator]
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match="expected one token, found 2"):
        bench.marker_embedding.main(dataclasses.replace(config, step_separator="ab"))
    with pytest.raises(UserError, match="exists"):
        bench.marker_embedding.main(config)


def test_time_of_an_event_is_without_those_inside_it(bench: types.SimpleNamespace) -> None:
    events = [("loop", 0.0, 10.0), ("a", 1.0, 4.0), ("inner", 2.0, 1.0), ("a", 5.0, 2.0), ("b", 10.0, 3.0)]
    assert bench.traces.self_times(events) == {"loop": 4.0, "a": 5.0, "inner": 1.0, "b": 3.0}


def test_operations_of_a_step_are_summed_by_their_kind(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    """Of a run that setup() builds."""
    shape = bench.profile_run.ShapeOptions(hidden=64, layers=2, steps=2)
    config = bench.profile_run.ProfileConfig(
        shape, ModelConfig(dtype="float32", remat="none"), packing=PackingConfig(batch_size=8, row_shapes=1)
    )
    run = bench.profile_run.Run(config, jax.devices()[:1], tmp_path)
    assert run.network.backbone.num_hidden_layers == 2 and run.loader.num_steps > 2
    placed = run.put(run.loader.batch(0).packed)
    text = run.built.train_step.lower(run.state, placed).compile().as_text()
    seconds = bench.traces.seconds_by_kind(lambda: jax.block_until_ready(run.step(placed)), 2, text)
    kinds = {"attention", "products with weights", "norms", "optimizer", "clipping", "embedding"}
    assert kinds <= set(seconds)
    assert seconds.get(bench.traces.OTHER, 0.0) < sum(seconds.values()) / 4
    assert all(value >= 0 for value in seconds.values())


def test_the_log_of_a_start_is_parsed(bench: types.SimpleNamespace) -> None:
    lines = [
        "devices  1 x cpu",
        "model  m",
        "train  1 row",
        "train  C=1",
        "",
        "held out  none",
        "steps  2",
        "weights  w",
    ]
    lines += ["step 1/1  C=1  loss 0.5", "step 1: held-out"]
    seconds = iter(range(1, 20))
    found = bench.startup.marks(lines, lambda: float(next(seconds)))
    log = [
        "Finished tracing + transforming train_step for pjit in 0.5 sec",
        "Finished XLA compilation of jit(train_step) in 1.25e+00 sec",
        "Finished XLA compilation of jit(eval_step) in 7 sec",
    ]
    parts = bench.startup.parts(found, log)
    assert parts == {
        bench.startup.TOTAL: 7.0,
        "imports, devices": 1.0,
        "network": 1.0,
        "corpus": 2.0,
        "plan, held-out corpus": 1.0,
        "weights": 1.0,
        "first step": 1.0,
        bench.startup.COMPILING: 1.75,
    }


def test_a_start_that_fails_raises_its_reason(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        bench.startup.start(["--no-such-flag=1"], tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("linear_probe", ["--seeds="], "--seeds is empty"),
        ("linear_probe", ["--seeds=one"], "--seeds: 'one' is not a whole number"),
        ("linear_probe", ["--state_of=nothing"], "--state_of=nothing is not among"),
        ("large_checkpoint", ["--config=absent.json"], "absent.json"),
        ("redundancy_pairs", [], "--scores and --train are required"),
        ("redundancy_pairs", ["--scores=absent.jsonl", "--train=absent.jsonl"], "absent.jsonl"),
    ],
)
def test_errors_of_users_are_one_line(
    bench, monkeypatch, capsys, name: str, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "bench" / f"{name}.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.json"), 2, "error: a.json: No such file or directory\n"),
        (OSError("a is no\nmodel"), 2, "error: a is no model\n"),
        (UserError("--seeds is empty"), 2, "error: --seeds is empty\n"),
        (KeyboardInterrupt(), 130, "interrupted: bench --rounds=2\n"),
    ],
)
def test_a_bench_ends_as_a_command_does(bench, monkeypatch, capsys, error, status, line) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds=2"])

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        bench.common.run_main(main)
    assert (ended.value.code, capsys.readouterr().err) == (status, line)


def test_a_bench_passes_on_a_status_and_the_faults_of_programs(bench, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.common.run_main(lambda: 3)
    assert ended.value.code == 3
    failing = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with pytest.raises(SystemExit) as ended:
        bench.common.run_main(lambda: bench.common.last_json(failing))
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith("error: ") and error.endswith(": no such thing\n")
    with pytest.raises(ZeroDivisionError):  # a fault of the bench itself
        bench.common.run_main(lambda: 1 // 0)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²", ""])
def test_what_is_counted_is_a_whole_number_from_1(bench, text) -> None:
    assert bench.common.positive("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1"):
        bench.common.positive(text)


def test_rows_without_their_fields_are_errors(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    for damaged in (
        {"prompt": "q"},
        {"completions": ["a"]},
        {"prompt": "q", "completions": ["a"], "redundancy": [1, 0]},
    ):
        path.write_text(json.dumps(damaged) + "\n")
        with pytest.raises(UserError, match=r'rows.jsonl:1: expected "prompt", "completions"'):
            bench.redundancy_pairs.read([str(path)])
    rows = [{"prompt": "q", "completions": [text], "redundancy": [kind]} for text, kind in (("a", 1), ("b", 0))]
    path.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], {**rows[1], "step_scores": [0.5]})))
    config = bench.redundancy_pairs.PairsConfig(scores=(str(path),), train=(str(path),))
    with pytest.raises(UserError, match="not all rows have the same scores"):
        bench.redundancy_pairs.main(config)


def test_redundancy_is_compared_after_the_same_prefix(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    """Two records: after "a" a redundant step and two useful ones, after "b" one of each, elsewhere one kind alone."""

    def row(source: str, prompt: str, steps: list[str], redundancy: list[float | None], output: list[float]) -> str:
        made = {"prompt": prompt, "completions": steps, "redundancy": redundancy, "source": source}
        return json.dumps({**made, "step_redundancy": output, "step_scores": [0.5] * len(steps)}) + "\n"

    scores = tmp_path / "scores.jsonl"
    scores.write_text(
        row("1", "q", ["a", "again a"], [0, 1], [0.1, 0.6])
        + row("1", "q", ["a", "x 1"], [0, 0], [0.1, 0.7])
        + row("1", "q", ["a", "y 22"], [0, 0], [0.1, 0.2])
        + row("1", "q", ["a", "z 22"], [0, None], [0.1, 0.9])
        + row("2", "r", ["b", "same"], [0, 1], [0.1, 0.6])
        + row("2", "r", ["b", "other 3"], [0, 0], [0.1, 0.6])
    )
    module = bench.redundancy_pairs
    steps = module.read([str(scores)])
    assert len(steps) == 7 and sum(one.redundant for one in steps) == 2
    found = module.pairs(steps)
    assert sorted((record, steps[i].text, steps[j].text) for record, i, j in found) == [
        ("1", "again a", "x 1"),
        ("1", "again a", "y 22"),
        ("2", "same", "other 3"),
    ]
    # 0.6 against 0.7, 0.2, and itself.
    values = np.array([one.scores["redundancy"] for one in steps])
    share, *resampled = module.higher(values, found, 1000, 0)
    # A half in each record, so in each sample of them.
    assert share == 0.5 and set(resampled) == {0.5}
    alone = module.higher(values + np.array([one.record == "2" and one.redundant for one in steps]), found, 1000, 0)
    assert alone[0] == 2 / 3 and set(alone[1:]) == {0.5, 2 / 3, 1.0}
    # No step with a number is redundant: the text alone tells them apart.
    assert module.higher(module.text_model(steps, steps), found, 100, 0)[0] == 1.0
    assert [module.features(one)[2] for one in steps if one.text in ("again a", "x 1")] == [1.0, 0.0]
    with pytest.raises(UserError, match="no step with a redundancy"):
        scores.write_text(row("1", "q", ["a"], [None], [0.1]))
        module.read([str(scores)])
