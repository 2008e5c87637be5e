"""What the benches have in common, and the laws that bench/growth.py reads out of its points."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import types
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from cfprm_jax.config import ModelConfig, PackingConfig
from cfprm_jax.data.packing import tokens_placed

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The modules of bench/, which are not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    names = ("common", "earlier_steps", "growth", "growth_parts", "profile_run", "startup", "traces")
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


def test_json_says_where_it_comes_from(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
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


@pytest.mark.parametrize(("power", "factor"), [(1.0, 3.0), (2.0, 0.5), (0.0, 7.0)])
def test_a_power_is_found(bench: types.SimpleNamespace, power: float, factor: float) -> None:
    x = [8, 16, 32, 64, 107]
    law = bench.growth.power_law(x, [factor * value**power for value in x])
    assert law == {"exponent": pytest.approx(power), "residual": 0.0, "last_exponent": pytest.approx(power)}


def test_what_is_fixed_shows_in_the_residual_and_not_at_the_end(bench: types.SimpleNamespace) -> None:
    x = [1, 10, 100, 1000]
    law = bench.growth.power_law(x, [10 + value for value in x])
    assert law["exponent"] < 0.8 and law["residual"] > 0.1 and law["last_exponent"] > 0.95
    assert bench.growth.power_law([1, 2], [0, 1])["exponent"] is None


def test_made_solutions_share_a_path(bench: types.SimpleNamespace) -> None:
    made = bench.growth.solutions(40, 20)
    assert len(made) == 40
    assert max(len(one.step_positions) for one in made) == 20
    for one in made:
        assert one.step_positions[-1] == len(one.tokens) - 1
        assert len(one.labels) == len(one.step_positions)
    first, last = made[0].tokens, made[31].tokens
    assert np.array_equal(first[:-16], last[: len(first) - 16])
    assert not np.array_equal(made[0].tokens[:16], made[32].tokens[:16])
    tree, sequence = (bench.growth.packed(made, packing) for packing in ("tree", "sequence"))
    assert tokens_placed(tree) < tokens_placed(sequence) / 3
    assert tokens_placed(sequence) == sum(len(one.tokens) for one in made)


def test_time_of_an_event_is_without_those_inside_it(bench: types.SimpleNamespace) -> None:
    events = [("loop", 0.0, 10.0), ("a", 1.0, 4.0), ("inner", 2.0, 1.0), ("a", 5.0, 2.0), ("b", 10.0, 3.0)]
    assert bench.traces.self_times(events) == {"loop": 4.0, "a": 5.0, "inner": 1.0, "b": 3.0}


def test_operations_of_a_compiled_step_are_told_apart(bench: types.SimpleNamespace) -> None:
    network = bench.growth_parts.Network("auto")
    point = network.point(bench.growth.packed(bench.growth.solutions(4, 4), "tree"))
    seconds = bench.traces.seconds_by_kind(point.run, 2, point.text)
    kinds = {"attention", "products with weights", "norms", "optimizer", "clipping", "embedding"}
    assert kinds <= set(seconds)
    assert seconds.get(bench.traces.OTHER, 0.0) < sum(seconds.values()) / 4
    assert all(value >= 0 for value in seconds.values())


def test_xla_counts_more_for_a_longer_row(bench: types.SimpleNamespace) -> None:
    network = bench.growth_parts.Network("xla")
    costs = []
    for length in (128, 256):
        one = bench.growth.solutions(1, 1, length - 48)
        costs.append(network.point(bench.growth.packed(one, "sequence")).costs)
    assert costs[1]["tokens computed"] == 2 * costs[0]["tokens computed"]
    for unit in ("XLA FLOPs", "FLOPs needed"):
        assert 1.5 < costs[1][unit] / costs[0][unit] < 3
    # XLA computes blocks of pairs of which half are seen, and counts what is no product too.
    assert 1 < costs[1]["XLA FLOPs"] / costs[1]["FLOPs needed"] < 2


def test_what_a_start_says_is_taken_apart(bench: types.SimpleNamespace) -> None:
    said = [
        "devices  1 x cpu",
        "model  m",
        "train  1 row",
        "train  C=1",
        "",
        "held out  none",
        "steps  2",
        "weights  w",
    ]
    said += ["step 1/1  C=1  loss 0.5", "step 1: held-out"]
    seconds = iter(range(1, 20))
    found = bench.startup.marks(said, lambda: float(next(seconds)))
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


def test_a_start_that_fails_says_why(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        bench.startup.start(["--no-such-flag=1"], tmp_path)


def test_earlier_steps_do_the_same_work(bench: types.SimpleNamespace, tmp_path: pathlib.Path) -> None:
    """And are other programs, so that their times say something."""
    shape = bench.profile_run.ShapeOptions(hidden=64, layers=2, steps=2)
    config = bench.profile_run.ProfileConfig(
        shape, ModelConfig(dtype="float32", remat="none"), packing=PackingConfig(batch_size=8, row_shapes=1)
    )
    run = bench.profile_run.Run(config, jax.devices()[:1], tmp_path)
    placed = run.put(run.loader.batch(0).packed)
    first = jax.tree.map(np.asarray, run.state)
    lower = run.built.train_step.lower(run.state, placed).as_text()
    expected = {name: float(value) for name, value in run.step(placed).items()}
    moved = jax.tree.map(np.asarray, run.state)
    for name, earlier in bench.earlier_steps.EARLIER.items():
        with earlier.in_force():
            assert run.build(earlier.network(run.network)).train_step.lower(run.state, placed).as_text() != lower, name
        run.state = jax.device_put(first, run.built.state_shardings)
        found = run.step_without(earlier, placed)()
        assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-5, abs=1e-7), name
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), run.state.params, moved.params
        )
