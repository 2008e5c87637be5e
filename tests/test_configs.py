"""Every flag file under configs/ parses and resolves to the experiment of its name."""

from __future__ import annotations

import pathlib
import re

import pytest

from cfprm_jax import flags
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import options as experiments
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import refuse_unused

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"
EXPERIMENTS = sorted(p for p in (CONFIGS / "paper").glob("*.flags") if not p.stem.endswith("base"))
BACKBONES = {"instruct": "models/Qwen2.5-7B-Instruct", "math": "models/Qwen2.5-Math-7B"}
# Name of a row of the paper's table 2 -> the loss; ORM is BCE on one window over the whole solution.
LOSSES = {"orm": "bce", "bce": "bce", "mse": "mse", "q_ranking": "q_ranking"}


def resolve(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.chdir("/")  # a flag file means the same from anywhere
    return flags.parse(TrainConfig, ["train", f"--flagfile={path}"])


def test_the_table_and_the_sweep_are_complete():
    table = {f"{b}_{x}{c}" for b in BACKBONES for x in LOSSES for c in ("", "_c2")}
    sweep = {f"math_{x}_c{c}" for x in LOSSES if x != "orm" for c in (2, 3, 4)}
    assert {p.stem for p in EXPERIMENTS} == table | sweep


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_resolves_to_its_name(path, monkeypatch):
    match = re.fullmatch(r"(instruct|math)_(orm|bce|mse|q_ranking)(?:_c(\d))?", path.stem)
    assert match is not None
    backbone, row, c = match.groups()
    config = resolve(path, monkeypatch)
    assert config.model.model == BACKBONES[backbone]
    assert config.loss.loss == LOSSES[row]
    fine = (1,) if c is None else (int(c), 1)
    whole = ("whole",) if c is None else ("whole", int(c), 1)
    assert config.granularity.stages == (whole if row == "orm" else fine)
    assert config.run.output_dir == f"runs/{path.stem}"
    # What section 3.1 of the paper fixes for all of them.
    assert config.encoding.max_length == 2048
    assert config.optimizer.learning_rate == 2e-6
    assert config.packing.batch_size == 32
    assert config.granularity.epochs_per_granularity == 1
    assert config.granularity.schedule == "coarse_to_fine"
    assert config.packing.packing == "sequence"  # trajectories are shuffled one by one, as in the paper
    assert config.model.dtype == "bfloat16"
    assert config.loss.margin == 4.0
    assert config.train_data == ("data/prm800k/phase1_train.jsonl", "data/prm800k/phase2_train.jsonl")


def test_the_quickstart_is_coarse_to_fine_q_ranking_on_the_embedded_world(monkeypatch):
    config = resolve(CONFIGS / "quickstart.flags", monkeypatch)
    assert config.loss.loss == "q_ranking"
    assert config.granularity.stages == (2, 1)
    assert config.train_data == ("synthetic",)
    assert config.model.model == "synthetic"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.flags")), ids=lambda p: str(p.relative_to(CONFIGS)))
def test_no_file_sets_an_option_without_effect(path, monkeypatch):
    try:
        config = resolve(path, monkeypatch)
    except UserError as error:
        assert "Unknown command line flag" in str(error)  # of experiment
        given = ["experiment", f"--flagfile={path}"]
        if path.parent.name == "real" and "--grid=real" not in path.read_text():
            given.append("--train_data=a")
        experiments.refuse_unused(flags.parse(experiments.ExperimentConfig, given))
        return
    refuse_unused(config)
