"""How many steps a cell has, on which files, and what its result is known by; no cell is trained but one."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random

import huggingface_hub
import jax
import numpy as np
import pytest
from tiny_policies import write_language_model
from tiny_runs import write_model, write_weights

from cfprm_jax import flags, synthetic
from cfprm_jax.config import DeviceConfig, EncodingConfig, EvalConfig, GranularityConfig, ModelConfig, PackingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import Loader
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import options, run
from cfprm_jax.experiments.frontier import FrontierConfig
from cfprm_jax.experiments.grid import Cell, frontier_cells
from cfprm_jax.experiments.laboratory import LaboratoryConfig, Level
from cfprm_jax.experiments.runner import Materials, Runner
from cfprm_jax.experiments.search_runner import SearchGridConfig, SearchRunner
from cfprm_jax.experiments.treatment import lasting, num_steps
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.models import parameters
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.run import inputs
from cfprm_jax.run.data import training_corpus, training_loader
from cfprm_jax.run.options import RunConfig, TrainConfig
from cfprm_jax.runtime import digests
from cfprm_jax.sharding import rules
from cfprm_jax.synthetic.world import Problem

pytestmark = pytest.mark.quick_compile

ENCODING = EncodingConfig(system_prompt="", max_length=48)
TREE = PackingConfig(packing="tree", record_chunk=0, row_length=48)
SEQUENCE = PackingConfig(packing="sequence", row_length=48)


@pytest.fixture(scope="module")
def mesh():
    return rules.make_mesh(DeviceConfig(), jax.devices()[:1])


@pytest.fixture
def make_runner(tmp_path, mesh):
    """(packing, passes, rest of Materials) -> a runner on 24 records whose solutions begin alike.

    At C=2 one of an odd number of steps ends within a window of the longer ones, and so with a marker of its own.
    """
    rng, rows = random.Random(0), []
    for r in range(24):
        for n in rng.sample(range(1, 10), rng.randint(3, 6)):
            steps = [*["so"] * n, *["so=six"] * (n == 4)]
            labels = [step == "so" for step in steps]
            rows.append({"prompt": f"start=one+two-{r}", "completions": steps, "labels": labels, "source": f"r{r}"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    synthetic.materialise_model(tmp_path / "model")

    def make(packing, passes=1, log=lambda _: None, window_tail="keep", **more) -> Runner:
        base = TrainConfig(
            train_data=(str(tmp_path / "rows.jsonl"),),
            model=ModelConfig(model=str(tmp_path / "model"), remat="none", attention="xla", dtype="float32"),
            granularity=GranularityConfig(epochs_per_granularity=passes, window_tail=window_tail),
            packing=packing,
            encoding=ENCODING,
            eval=EvalConfig(eval_fraction=0.0),
            run=RunConfig(data_cache_dir=str(tmp_path / "cache")),
        )
        materials = Materials(**{"directory": tmp_path / "out", "base": base, "tests": {}, "sizes": (2,), **more})
        return Runner(materials, mesh, log)

    return make


def batches(config: TrainConfig, mesh, **packing) -> Loader:
    """Those of a run of train."""
    config = dataclasses.replace(config, packing=dataclasses.replace(config.packing, **packing))
    sources = inputs.materialise(config, pathlib.Path("unused"))
    corpus = training_corpus(config, sources, load_tokenizer(config.model.model, config.encoding.marker))
    return training_loader(config, corpus, mesh)


def steps_of(config: TrainConfig, loader: Loader) -> int:
    """As train has them."""
    return min(loader.num_steps, config.run.max_steps or loader.num_steps)


def tokens_of(loader: Loader, steps: int) -> int:
    return sum(loader.batch(step).tokens_computed for step in range(steps))


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("size", [{"batch_tokens": 200}, {"batch_size": 8}], ids=["tokens", "trajectories"])
@pytest.mark.parametrize("chunk", [0, 4])
def test_as_many_computed_tokens(make_runner, mesh, size, chunk, passes) -> None:
    """As trees have that are cut into rows, in steps of --batch_tokens or of --batch_size."""
    runner = make_runner(dataclasses.replace(SEQUENCE, **size), passes)
    suffix = f"_{chunk}" if chunk else ""
    config = runner.train_config(Cell("real", "bce", f"plain_compute{suffix}", 1))
    assert config.packing.packing == "sequence"
    own, together = batches(config, mesh), batches(config, mesh, packing="tree", record_chunk=chunk)
    steps, wanted = steps_of(config, own), tokens_of(together, together.num_steps)
    assert steps < own.num_steps
    assert abs(tokens_of(own, steps) - wanted) < tokens_of(own, own.num_steps) / own.num_steps


def test_as_many_computed_tokens_where_both_share(make_runner, mesh) -> None:
    """Runs of four of a record against whole records, which compute less."""
    runner = make_runner(dataclasses.replace(TREE, batch_tokens=100))
    plain, config = (runner.train_config(Cell("real", "bce", name, 1)) for name in ("plain", "plain_compute_4"))
    own, together = batches(config, mesh), batches(plain, mesh, record_chunk=4)
    steps = steps_of(config, own)
    assert steps == config.run.max_steps and config.granularity.epochs_per_granularity == 2
    assert tokens_of(own, steps) == pytest.approx(tokens_of(together, together.num_steps), abs=100)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("treatment", ["plain_matched", "plain_once", "c2", "c2_once"])
def test_as_many_steps_as_windows_have(make_runner, mesh, treatment, seed) -> None:
    """Where those share fewer prefixes than single steps, so that as many passes over single steps have fewer steps."""
    runner = make_runner(dataclasses.replace(TREE, batch_tokens=100), passes=2)
    plain, windows, config = (
        runner.train_config(Cell("real", "bce", name, seed)) for name in ("plain", "c2", treatment)
    )
    wanted = batches(windows, mesh).num_steps
    assert wanted > 2 * batches(plain, mesh).num_steps
    assert steps_of(config, batches(config, mesh)) == config.run.max_steps == wanted
    assert config.granularity.epochs_per_granularity == (5 if treatment.startswith("plain") else 2)


def test_granularities_with_too_few_steps_are_named(make_runner, mesh) -> None:
    """Windows of four without shorter ones: half of the solutions have none."""
    lines: list[str] = []
    runner = make_runner(dataclasses.replace(SEQUENCE, batch_size=8), log=lines.append, window_tail="drop")
    config = runner.train_config(Cell("real", "bce", "c4", 0))
    wanted = runner.train_config(Cell("real", "bce", "c2", 0)).run.max_steps
    own = batches(config, mesh).num_steps
    assert config.run.max_steps == own < wanted and config.granularity.epochs_per_granularity == 1
    assert lines == [f"steps       real/bce.c4.0: {own}, all that its granularities have, not {wanted}"]


def test_passes_differ_in_steps(make_runner) -> None:
    """In proportion to the first ones, some runs would be a step short of what they are to have."""
    runner = make_runner(dataclasses.replace(TREE, batch_tokens=100))
    config = runner.train_config(Cell("real", "bce", "plain", 2))
    corpus = runner._corpus(config)
    once, short = num_steps(config, corpus), 0
    for steps in range(1, 5 * once + 1):
        found = lasting(config, steps, corpus, asked="--x")
        assert num_steps(found, corpus) >= steps == found.run.max_steps
        short += found.granularity.epochs_per_granularity > -(-steps // once)
    assert short


@pytest.mark.parametrize("passes", [2, 4])
def test_passes_of_the_frontier_are_those_of_its_tokens(make_runner, mesh, passes) -> None:
    """Whatever --epochs_per_granularity is; results are known by the same fingerprint."""
    cell = Cell("real", "bce", "together1.trajectory.negatives1.step200.train6000.rate0.002", 0)
    config = make_runner(SEQUENCE).train_config(cell)
    own = batches(config, mesh)
    assert tokens_of(own, steps_of(config, own)) == pytest.approx(6000, rel=0.04)
    assert make_runner(SEQUENCE, passes).train_config(cell) == config
    assert make_runner(SEQUENCE, passes).fingerprint(cell) == make_runner(SEQUENCE).fingerprint(cell)
    plain = Cell("real", "bce", "plain", 0)
    assert make_runner(SEQUENCE, passes).fingerprint(plain) != make_runner(SEQUENCE).fingerprint(plain)


def test_more_tokens_than_passes_may_have(make_runner) -> None:
    def config(tokens: int) -> TrainConfig:
        axes = FrontierConfig(
            together=("1",), label_weights=("node",), step_tokens=("200",), train_tokens=(f"{tokens}",)
        )
        return make_runner(SEQUENCE).train_config(frontier_cells(("bce",), ("real",), (0,), axes)[0])

    message = (
        r"^--train_tokens=9000000 is \d\d,000 steps, \d,\d\d\d passes over the training data; a run has at most 1,000 "
        r"passes, here about [\d,]+ tokens\. Lower it, or train on more data$"
    )
    with pytest.raises(UserError, match=message) as caught:
        config(9_000_000)
    possible = int(str(caught.value).split("about ")[1].split(" tokens")[0].replace(",", ""))
    assert 900 < config(possible).granularity.epochs_per_granularity <= 1000


def test_more_passes_than_a_run_may_have(make_runner) -> None:
    grid = [Cell("real", "bce", "plain", 0), Cell("real", "bce", "plain_matched", 0)]
    runner = make_runner(SEQUENCE, passes=501)
    runner.prepare(grid[:1])
    with pytest.raises(UserError, match="=501: expected at most 500 with 'plain_matched', which has 2 times as many"):
        runner.prepare(grid)
    matched = make_runner(dataclasses.replace(TREE, batch_tokens=100), passes=490)
    with pytest.raises(
        UserError, match=r"--epochs_per_granularity=490 for real/bce.plain_matched.0 is .* at most 1,000"
    ):
        matched.train_config(grid[1])


@pytest.mark.parametrize("model", ["owner/model", "synthetic"])
def test_models_by_name_on_other_data(one_device, make_runner, tmp_path, monkeypatch, model) -> None:
    """One of the hub is downloaded once; the synthetic one is written into the experiment's directory."""
    make_runner(SEQUENCE)  # writes the data
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    calls: list[str] = []
    hub = tmp_path / "hub"
    write_model(hub)
    write_weights(hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: calls.append(name) or str(hub))
    candidates = [{"steps": ["so", f"so={word}"], "correct": word == "six"} for word in ("six", "one", "two")]
    test = {"id": 0, "question": "start=one", "answer": "six", "candidates": candidates}
    (tmp_path / "test.jsonl").write_text(json.dumps(test) + "\n")
    given = [
        *("experiment", f"--model={model}", f"--init={'random' if model == 'synthetic' else 'pretrained'}"),
        *(f"--train_data={tmp_path / 'rows.jsonl'}", f"--tests=t={tmp_path / 'test.jsonl'}", "--n=2"),
        *("--rows=bce", "--treatments=plain_matched", "--grouping_rows=", "--seeds=0", "--batch_size=64"),
        *("--packing=sequence", "--row_length=160", "--row_shapes=1", "--max_length=160", "--system_prompt="),
        *("--dtype=float32", "--remat=none", "--attention=xla"),
        *(f"--output_dir={tmp_path / 'out'}", f"--data_cache_dir={tmp_path / 'cache'}"),
    ]
    assert run.run(flags.parse(options.ExperimentConfig, given), lambda _: None).cells == 1
    assert calls == ["owner/model"] * (model == "owner/model")
    directory = hub if calls else tmp_path / "out" / "synthetic" / "model"
    options_of_cell = tmp_path / "out" / "cells" / "real" / "bce.plain_matched.0" / "train.flags"
    assert f"--model={directory}" in options_of_cell.read_text().splitlines()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A policy, and a level of the laboratory with a training set and a test set of two questions."""
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("world")
    policy, _ = write_language_model(directory, tied=True)
    problems = [Problem(3, (2, -4)), Problem(0, (1,))]
    rows = [
        {"prompt": p.question, "completions": ["so", "so=six"], "labels": [1, 0], "source": str(i)}
        for i, p in enumerate(problems)
    ]
    (directory / "train_0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = [
        {
            "id": i,
            "question": p.question,
            "answer": "one",
            "candidates": [{"steps": ["so"], "correct": bool(k)} for k in range(2)],
        }
        for i, p in enumerate(problems)
    ]
    (directory / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    # Reward models start from "backbone" beside the policy.
    return Level(policy.with_name("policy"), {"short": directory / "short.jsonl"}, {0: directory / "train_0.jsonl"})


def in_laboratory(make_runner, world, temperature: float, kind=Runner, **options):
    """A runner of --sampling_temperature on this world."""
    made = LaboratoryConfig(sampling_temperature=temperature, rollouts=4)
    runner = make_runner(dataclasses.replace(TREE, batch_size=8), laboratory=made)
    if kind is SearchRunner:
        config = SearchGridConfig(search_questions=2, search_n=("4",), search_methods=("best_of_n",))
        found = SearchRunner(runner._materials, config, runner._mesh, runner._log)
        found._runner._levels = {"some": world}
        return found
    runner._levels = {"some": world}
    return runner


def test_rollouts_of_another_temperature_have_files_of_their_own(make_runner, world) -> None:
    """Those made at 1 keep their name, and are not taken for others: earlier versions made all of them at 1."""
    train = world.train[0]
    for name in ("rolled4", "rolled4.temperature0.7", "consensus4", "consensus4.temperature0.7", "oracle"):
        train.with_name(f"train_0.{name}.jsonl").write_bytes(train.read_bytes())
    for treatment, temperature, name in (
        ("soft", 1.0, "rolled4"),
        ("soft", 0.7, "rolled4.temperature0.7"),
        ("consensus", 1.0, "consensus4"),
        ("consensus", 0.7, "consensus4.temperature0.7"),
        ("oracle", 0.7, "oracle"),
        ("exact", 0.7, "rolled4.temperature0.7"),
    ):
        runner = in_laboratory(make_runner, world, temperature)
        assert runner._train(Cell("some", "bce", treatment, 0)) == (str(train.with_name(f"train_0.{name}.jsonl")),)


def test_searches_have_the_laboratorys_temperature(make_runner, world) -> None:
    """At 0 the seed makes no difference."""
    runner = in_laboratory(make_runner, world, 0.0, SearchRunner)
    backbone = BackboneConfig.from_hf(json.loads((world.model / "config.json").read_text()))
    network = PRMConfig(backbone, "linear", "float32", "xla", "none")
    params = parameters.init_params(network, jax.random.key(0))
    loaded = LoadedPRM(network, params, load_tokenizer(world.model, ENCODING.marker), ENCODING, {})
    first, second = (runner._search(Cell("some", "bce", "plain_once", seed), loaded) for seed in (0, 1))
    assert first.keys() == {f"{kind}/short/best_of_n.n4" for kind in ("right", "policy", "reward")}
    np.testing.assert_equal(first, second)


def test_what_searches_are_known_by(make_runner, world) -> None:
    cell = Cell("some", "bce", "plain_once", 0)
    plain, warm = (in_laboratory(make_runner, world, temperature, SearchRunner) for temperature in (1.0, 0.7))
    before = digests.of_json([plain._runner.fingerprint(cell), dataclasses.asdict(plain._config)])
    assert plain._fingerprint(cell) == before != warm._fingerprint(cell)
