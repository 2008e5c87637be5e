"""What a run opens before its first step."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil

import jax
import pytest

from cfprm_jax import flags
from cfprm_jax.config.shared import EVAL_METRICS
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import HiddenStates
from cfprm_jax.errors import UserError
from cfprm_jax.run import data, inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import validate_options
from cfprm_jax.sharding import rules


def test_held_out_solutions_of_one_step_are_no_error_for_a_coarse_to_fine_run(tiny, tmp_path) -> None:
    """Evaluation is at the finest granularity, so what has no coarser sample is evaluated all the same."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "q", "completions": ["a"], "labels": [1]}))
    config = flags.parse(TrainConfig, ["train", *tiny.arguments("nothing"), f"--eval_data={held_out}"])
    mesh = rules.make_mesh(config.device, jax.devices()[:1])
    tokenizer = load_tokenizer(tiny.directory / "model")
    logged: list[str] = []
    splits = data.open_splits(config, inputs.materialise(config, tmp_path), tokenizer, mesh, log=logged.append)
    assert [batch.trajectories for batch in splits.held_out] == [1]
    assert "held out    1 trajectory" in logged


def splits_of(tiny, tmp_path, *options: str, hidden: HiddenStates | None = None) -> tuple[data.DataSplits, list[str]]:
    """Of four questions, with correct and incorrect steps unless an option names another corpus."""
    rows = [
        {"prompt": f"q{number}", "completions": ["a", "b"], "labels": [1, number % 2]}
        for number in range(4)
        for _ in range(2)
    ]
    (tmp_path / "four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [*tiny.arguments("nothing"), f"--train_data={tmp_path / 'four.jsonl'}", *options]
    config = flags.parse(TrainConfig, ["train", *given])
    mesh = rules.make_mesh(config.device, jax.devices()[:1])
    tokenizer = load_tokenizer(tiny.directory / "model")
    logged: list[str] = []
    sources = inputs.materialise(config, tmp_path)
    return data.open_splits(config, sources, tokenizer, mesh, log=logged.append, hidden=hidden), logged


def test_a_fraction_that_holds_out_no_question_is_named(tiny, tmp_path) -> None:
    """And --keep_best, which then has nothing to rank by, is an error."""
    splits, logged = splits_of(tiny, tmp_path, "--eval_fraction=0.001")
    assert not splits.held_out
    assert logged[-1].startswith("held out    none of 4 questions, so there is no evaluation: --eval_fraction=0.001 ")
    with pytest.raises(UserError, match=r"--keep_best=loss has no value here: .* 0 positive steps and 0 negative"):
        splits_of(tiny, tmp_path, "--eval_fraction=0.001", "--keep_best=loss")
    _, logged = splits_of(tiny, tmp_path, "--eval_fraction=0")
    assert logged[-1] == "held out    no question, so there is no evaluation"


@pytest.mark.parametrize("metric", EVAL_METRICS)
def test_the_best_needs_held_out_steps_that_rank_it(tiny, tmp_path, metric: str) -> None:
    """Correct steps alone have neither an AUROC nor an F1 of incorrect ones."""
    held_out = tmp_path / "held_out.jsonl"
    found = r"2 (distinct )?positive steps and 0 (distinct )?negative"
    for labels, fine in (([1, 0], True), ([1, 1], metric in ("loss", "step_accuracy"))):
        held_out.write_text(json.dumps({"prompt": "q", "completions": ["a", "b"], "labels": labels}))
        with contextlib.nullcontext() if fine else pytest.raises(UserError, match=found):
            splits_of(tiny, tmp_path, f"--eval_data={held_out}", f"--keep_best={metric}")


def test_distinct_steps_rank_by_the_mean_of_their_labels(tiny, tmp_path) -> None:
    """One step that three solutions share is labelled 1, 1, 0: positive once, and no negative one is left."""
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"prompt": "q", "completions": ["a"], "labels": [label]} for label in (1, 1, 0)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits_of(tiny, tmp_path, f"--eval_data={held_out}", "--keep_best=auroc")
    found = "=distinct_auroc has no value here: .* have 1 distinct positive step and 0 distinct negative steps"
    with pytest.raises(UserError, match=found):
        splits_of(tiny, tmp_path, f"--eval_data={held_out}", "--keep_best=distinct_auroc")


class Unread:
    """Hidden states that are nowhere; none are to be read."""

    def prepare(self, reader, trajectories=None) -> None: ...

    def __call__(self, members, encoded, packed):
        raise AssertionError("hidden states are read")


def test_hidden_states_are_not_read_to_count(tiny, tmp_path) -> None:
    splits, logged = splits_of(tiny, tmp_path, "--eval_fraction=0.5", "--keep_best=loss", hidden=Unread())
    assert splits.held_out and logged[-1].startswith("held out    ") and "trajector" in logged[-1]


def test_the_digest_of_what_is_held_out(tiny, tmp_path) -> None:
    """Other files or fewer trajectories are something else to be evaluated on; a limit above all of them is not."""
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"prompt": f"q{number}", "completions": ["a"], "labels": [1]} for number in range(3)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def digest(*options: str) -> str | None:
        return splits_of(tiny, tmp_path, *options)[0].held_out_digest

    first = digest(f"--eval_data={held_out}")
    assert first == digest(f"--eval_data={held_out}", "--eval_max_trajectories=3", "--seed=1")
    assert first != digest(f"--eval_data={held_out}", "--eval_max_trajectories=2")
    moved = held_out.rename(tmp_path / "moved.jsonl")
    assert first == digest(f"--eval_data={moved}")
    moved.write_text(moved.read_text().replace("q1", "q4"))
    assert first != digest(f"--eval_data={moved}")
    assert digest("--eval_fraction=0") is None


def test_a_directory_without_weights_trains_from_random_ones_alone(tiny, tmp_path) -> None:
    given = [*tiny.arguments("nothing"), "--init=pretrained"]
    config = flags.parse(TrainConfig, ["train", *given])
    with pytest.raises(UserError, match=r"--model=.*model has a config.json and no weights .*; --init=random trains"):
        inputs.adopt_prm_options(config, inputs.materialise(config, tmp_path), print)


def test_a_model_that_cannot_be_had_is_the_runs_own_on_resume(tiny, tmp_path, monkeypatch) -> None:
    """As on a machine without the hub's cache and without a network; with a checkpoint and nothing frozen alone."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(tiny.directory / "model", tmp_path / "model")
    given = [*tiny.arguments("nothing"), "--init=pretrained", "--model=owner/name", "--resume=auto"]

    def directory(*options: str) -> pathlib.Path:
        config = flags.parse(TrainConfig, ["train", *given, *options])
        return inputs.materialise(config, tmp_path).model

    with pytest.raises(UserError, match="--model=owner/name is not a directory, and downloading"):
        directory()
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert directory() == tmp_path / "model"
    for option in ("--resume=never", "--lora_rank=2", "--frozen_layers=1"):
        with pytest.raises(UserError, match="--model=owner/name is not a directory, and downloading"):
            directory(option)


def test_the_synthetic_network_for_other_data(tmp_path) -> None:
    """A network and a tokenizer that encodes any text; none of the synthetic data."""
    config = flags.parse(TrainConfig, ["train", "--model=synthetic", "--init=random", "--train_data=mine.jsonl"])
    validate_options(config)
    sources = inputs.materialise(config, tmp_path)
    assert sources == inputs.Sources(tmp_path / "synthetic" / "model", "random", ("mine.jsonl",), (), "")
    assert [path.name for path in (tmp_path / "synthetic").iterdir()] == ["model"]
    text = "What is 12 × 7?\n\nAntwort: 84"
    tokenizer = load_tokenizer(sources.model)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_synthetic_names_files_generated_from_the_seed(tmp_path) -> None:
    """The embedded default needs no file: model without weights, own held-out problems, candidates."""
    config = flags.parse(TrainConfig, ["train", "--bon_candidates=synthetic"])
    sources = inputs.materialise(config, tmp_path)
    assert sources.init == "random"
    assert (sources.model / "config.json").is_file()
    files = [*sources.train, *sources.held_out, sources.candidates]
    assert len(set(files)) == 3
    assert all(pathlib.Path(file).parent == tmp_path / "synthetic" for file in files)
    named = flags.parse(TrainConfig, ["train", "--model=m", "--train_data=a,b", "--eval_data=c"])
    assert inputs.materialise(named, tmp_path) == inputs.Sources(
        pathlib.Path("m"), "pretrained", ("a", "b"), ("c",), ""
    )
