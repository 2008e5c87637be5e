"""The search command, end to end with a small random policy and PRM."""

from __future__ import annotations

import contextlib
import json
import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("torch")
from completion_servers import serving
from tiny_policies import write_language_model

import cfprm_jax
from cfprm_jax import flags, search, synthetic
from cfprm_jax.checkpoints.model_files import write_model
from cfprm_jax.checkpoints.saving import Checkpoints
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig, OptimizerConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.load import open_prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params, param_specs
from cfprm_jax.training.optimizer import AdamW
from cfprm_jax.training.step import TrainState

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("lm"), tied=True)[0]


@pytest.fixture(scope="module")
def prm(tmp_path_factory):
    world = synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)
    directory = tmp_path_factory.mktemp("export") / "prm"
    config = PRMConfig(loading.read_config(world.model)[0])
    encoding = EncodingConfig(max_length=256, system_prompt="", step_separator="four")
    params, tokenizer = init_params(config, jax.random.key(0)), load_tokenizer(world.model)
    loading.export(directory, params, config, tokenizer, encoding, dtype="float32")
    return directory


@pytest.fixture
def run_of_train(prm, tmp_path):
    """A run's directory with a checkpoint of step 1, and what saves another one."""
    directory = tmp_path / "run"
    loaded = open_prm(prm, "float32")
    write_model(
        directory,
        loaded.config.backbone.to_hf(),
        loaded.tokenizer,
        model=ModelConfig(dtype="float32"),
        encoding=loaded.encoding,
        loss=LossConfig(),
        granularity=GranularityConfig(),
    )
    optimizer = AdamW(OptimizerConfig(), lambda step: 0.0, param_specs(loaded.config))
    state = TrainState(*optimizer.init(loaded.params), jnp.int32(1))

    def save(step):
        with contextlib.closing(Checkpoints(directory, keep=2)) as checkpoints:
            checkpoints.save(step, state, {}, {"step": step})

    save(1)
    return directory, save


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "question": f"one+{'two' * i}", "answer": "3"}) + "\n" for i in range(2))
    )
    return path


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def run(*arguments: str) -> int:
    return flags.run(search.SearchConfig, search.main, ["search", "--compile_cache_dir=", *arguments])


def given(policy, prm, questions, output, **changes) -> list[str]:
    chosen = {"n": 4, "beam_width": 2, "max_new_tokens": 24, "max_steps": 4, "system_prompt": "", "seed": 1, **changes}
    return [f"--model={policy}", f"--reward={prm}", f"--questions={questions}", f"--output={output}"] + [
        f"--{name}={value}" for name, value in chosen.items()
    ]


def test_candidates_with_scores_and_costs(policy, prm, questions, tmp_path, capsys) -> None:
    output = tmp_path / "found.jsonl"
    assert run(*given(policy, prm, questions, output)) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1] and len(list(read_candidates(output))) == 2
    reference = cfprm_jax.load(prm)
    for row in rows:
        assert 0 < len(row["candidates"]) <= 4
        last = [candidate["step_logits"][-1] for candidate in row["candidates"]]
        assert last == sorted(last, reverse=True)
        best = row["candidates"][0]
        assert best["step_scores"] == pytest.approx(reference.score(row["question"], best["steps"]), rel=1e-4)
        cost = row["cost"]
        assert cost["policy_tokens"] >= cost["sampled_tokens"] > 0 and cost["reward_tokens"] <= cost["reward_requested"]
        assert 0 < cost["calls"] <= 4
        assert cost["policy_parameters"] > 0 and cost["reward_parameters"] > 0
        kept = sum(candidate["tokens"] for candidate in row["candidates"])
        assert cost["sampled_tokens"] - kept <= cost["discarded_tokens"] < cost["sampled_tokens"]
    assert "2 questions" in capsys.readouterr().out
    again = tmp_path / "again.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    (tmp_path / "again.jsonl.partial").write_bytes(lines[0])
    config = json.loads((tmp_path / "found.jsonl.config.json").read_text())
    (tmp_path / "again.jsonl.config.json").write_text(json.dumps(config))
    assert run(*given(policy, prm, questions, again), "--resume=auto") == 0
    resumed = [json.loads(line) for line in again.read_text().splitlines()]
    for row, before in zip(resumed, rows, strict=True):
        assert [c["text"] for c in row["candidates"]] == [c["text"] for c in before["candidates"]]


def test_a_run_as_reward_is_its_checkpoint_and_nothing_beside_it(policy, run_of_train, questions, tmp_path, capsys):
    directory, save = run_of_train
    output = tmp_path / "found.jsonl"
    assert run(*given(policy, directory, questions, output)) == 0
    assert f"reward      {directory}, step 1\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.jsonl.config.json").read_text())["resolved"]["step"] == 1
    whole = output.read_bytes()
    # As after a kill, with the events of a logger in the directory since.
    output.rename(tmp_path / "whole.jsonl")
    (tmp_path / "found.jsonl.partial").write_bytes(whole[: whole.index(b"\n") + 1])
    (directory / "events.out.tfevents.1").write_text("new")
    assert run(*given(policy, directory, questions, output), "--resume=auto") == 0
    assert [row["id"] for row in map(json.loads, output.read_text().splitlines())] == [0, 1]
    save(2)
    capsys.readouterr()
    assert run(*given(policy, directory, questions, output), "--resume=auto") == 2
    assert "was written with another reward" in capsys.readouterr().err


def test_the_policy_of_a_server(policy, prm, questions, tmp_path, capsys) -> None:
    """Its steps end with the PRM's separator, and its size is not known."""

    def handler(body):
        ends = body["seed"] % 2 == 0
        choice = {"text": "two+one", "finish_reason": "stop", "stop_reason": None if ends else "four"}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 3}}

    output = tmp_path / "found.jsonl"
    with serving(handler) as url:
        assert run(*given(policy, prm, questions, output, engine=url, max_new_tokens=12)) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    for row in rows:
        assert row["cost"]["policy_parameters"] is None and row["cost"]["policy_tokens"] > row["cost"]["sampled_tokens"]
        assert all(set(candidate["steps"]) == {"two+one"} for candidate in row["candidates"])
    assert f"policy      scripted at {url}" in capsys.readouterr().out
    # Resumed with another model at the server, as after a kill.
    first = tmp_path / "first.jsonl.partial"
    first.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    (tmp_path / "first.jsonl.config.json").write_bytes((tmp_path / "found.jsonl.config.json").read_bytes())
    again = given(policy, prm, questions, tmp_path / "first.jsonl", max_new_tokens=12)
    with serving(handler, models={"data": [{"id": "other"}]}) as url:
        assert run(*again, f"--engine={url}", "--resume=auto") == 2
    assert "were written with policy scripted, found policy other" in capsys.readouterr().err
    # Solutions of several lines whose separator the policy never writes.
    choice = {"text": "two\none", "finish_reason": "stop", "stop_reason": None}
    with serving(lambda _: (200, {"choices": [choice], "usage": {"completion_tokens": 3}})) as url:
        assert run(*given(policy, prm, questions, tmp_path / "lines.jsonl", engine=url, max_new_tokens=12)) == 0
    assert re.search(r"^one step    (\d+) of \1 texts are one step", capsys.readouterr().out, re.MULTILINE)
    assert run(*given(policy, prm, questions, output, write_requests="x.jsonl")) == 2
    assert "are not for search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 5}, "--n=5 is not a multiple of --beam_width=2"),
        ({"method": "mcts"}, "method"),
        ({"granularity": 0}, "granularity"),
        ({"max_new_tokens": 100000}, "--max_new_tokens"),
        ({"step_separator": "\\x"}, "--step_separator: unknown escape"),
        ({"method": "best_of_n"}, "--beam_width=2 is for --method=beam and dvts, not best_of_n"),
        ({"method": "best_of_n", "beam_width": 4}, "--max_steps=4 is for --method=beam, dvts and greedy, not best"),
        ({"temperature": 0, "top_k": 5}, "--top_k=5 is for a --temperature above 0"),
        ({"reward": "http://x", "prefix_cache_tokens": 0}, "--prefix_cache_tokens=0 is for a PRM of this process"),
    ],
)
def test_bad_flags(policy, prm, questions, tmp_path, capsys, changes, message) -> None:
    output = tmp_path / "found.jsonl"
    assert run(*given(policy, prm, questions, output, **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not output.exists()


def test_the_separator_of_a_server() -> None:
    assert search.SearchConfig().separator == "\n\n"
    assert search.SearchConfig(step_separator="→\\n").separator == "→\n"


def test_a_reward_that_is_none(policy, questions, tmp_path, capsys) -> None:
    for reward, message in (("/nowhere", "neither a directory"), ("http://127.0.0.1:1", "127.0.0.1:1")):
        assert run(*given(policy, reward, questions, tmp_path / "found.jsonl")) == 2
        assert message in capsys.readouterr().err
