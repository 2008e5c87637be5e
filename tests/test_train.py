"""The train command: real runs of a tiny model in processes of their own, killed, stopped, resumed, refused."""

from __future__ import annotations

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from cfprm_jax import flags, train
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.training import checkpoint, run_directory, sharding

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TIMING = ("steps_per_second", "tokens_per_second", "expanded_tokens_per_second")


def write_model(directory: pathlib.Path) -> None:
    """config.json of a tiny Qwen2 and a byte-level tokenizer, no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.save_pretrained(directory)
    config = {
        "model_type": "qwen2",
        "vocab_size": 264,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))


def write_corpus(path: pathlib.Path, questions: int) -> None:
    """Stepwise rows, three solutions of each question, with soft, missing and hard labels."""
    rng = random.Random(7)
    with path.open("w") as file:
        for q in range(questions):
            steps = [f"{rng.randint(1, 99)}+{q}" for _ in range(4)]
            for _ in range(3):
                labels = [rng.choice([1.0, 1.0, 0.0, 0.7, None]) for _ in steps[:3]] + [1.0]
                row = {"prompt": f"What is {q}?", "completions": [*steps[:3], str(rng.random())], "labels": labels}
                file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("world")
    (directory / "model").mkdir()
    write_model(directory / "model")
    write_corpus(directory / "train.jsonl", 32)
    return directory


def arguments(world: pathlib.Path, run: str, **options) -> list[str]:
    """Two granularities of 96 trajectories in batches of 6 less the held-out ones; one batch shape."""
    values = {
        "model": world / "model",
        "init": "random",
        "train_data": world / "train.jsonl",
        "eval_fraction": 0.2,
        "c_max": 2,
        "dtype": "float32",
        "learning_rate": 0.01,
        "system_prompt": "Score.",
        "max_length": 128,
        "row_length": 128,
        "packing": "none",
        "batch_size": 6,
        "checkpoint_every": 3,
        "log_every": 5,
        "output_dir": world / run,
        "data_cache_dir": world / "cache",
        **options,
    }
    return [f"--{name}={value}" for name, value in values.items()]


def start(world: pathlib.Path, arguments: list[str]) -> subprocess.Popen:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "cfprm_jax.train", *arguments, f"--compile_cache_dir={world / 'compiled'}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def rows(run: pathlib.Path) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMING} for line in lines]


def wait_for_step(process: subprocess.Popen, run: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} did not come: {process.communicate()[0]}")


@pytest.fixture(scope="module")
def straight(world) -> tuple[pathlib.Path, str]:
    """An undisturbed run and what it printed."""
    return world / "straight", finish(start(world, arguments(world, "straight")))


def same_result(a: pathlib.Path, b: pathlib.Path) -> None:
    assert rows(a) == rows(b)
    first, second = (checkpoint.load_for_inference(run, "float32") for run in (a, b))
    assert first.meta == second.meta
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_a_run(world, straight) -> None:
    """It says what it does; everything is where it should be; coarse before fine; loadable for scoring."""
    run, text = straight
    for expected in (
        "devices     1 x cpu",
        "parameters",
        "train       C=1:",
        "train       C=2:",
        "held out    ",
        "steps ",
    ):
        assert expected in text
    steps = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    order = [row["granularity"] for row in steps]
    assert order == sorted(order, reverse=True)
    assert set(order) == {2, 1}
    final = rows(run)[-1]
    assert final["step"] == len(steps)
    assert 0 <= final["eval_step_accuracy"] <= 1
    assert steps[-1]["loss"] < steps[order.index(1)]["loss"] + 1
    assert {p.name for p in run.iterdir()} >= {"config.json", "run.flags", "metrics.jsonl", "tensorboard", "model"}
    loaded = checkpoint.load_for_inference(run, "bfloat16")
    assert loaded.meta["step"] == len(steps)
    assert loaded.meta["loss"] == "q_ranking"
    assert loaded.encoding.system_prompt == "Score."
    assert loaded.params["backbone"]["embedding"].dtype == "bfloat16"
    assert loaded.params["head"]["output"]["kernel"].dtype == "float32"
    assert len(loaded.tokenizer("<extra_0>")["input_ids"]) == 1
    older = min(int(p.name) for p in (run / "checkpoints").iterdir())
    assert checkpoint.load_for_inference(run / "checkpoints" / str(older)).meta["step"] == older < len(steps)
    again = flags.parse(train.TrainConfig, ["train", f"--flagfile={run / 'run.flags'}"])
    assert json.loads(json.dumps(flags.as_dict(again))) == json.loads((run / "config.json").read_text())


def test_killed_it_comes_to_the_same_end(world, straight) -> None:
    """kill -9 after a random step; losses and parameters bit-equal to those of the undisturbed run.

    bench/kill_and_resume.py does this many times, also during saves.
    """
    total = rows(straight[0])[-1]["step"]
    run, given = world / "killed", arguments(world, "killed")
    process = start(world, given)
    wait_for_step(process, run, random.randint(4, total - 4))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resume      " in finish(start(world, [*given, "--resume=auto"]))
    same_result(straight[0], run)


def test_sigterm_saves_and_says_how_to_go_on(world, straight) -> None:
    run, given = world / "stopped", arguments(world, "stopped", checkpoint_every=1000)
    process = start(world, given)
    wait_for_step(process, run, 5)
    process.send_signal(signal.SIGTERM)
    text = finish(process)
    command = f"python -m cfprm_jax.train --flagfile={run}/run.flags --resume=auto"
    assert f"resume with: {command}" in text
    assert len(rows(run)) < len(rows(straight[0]))
    finish(start(world, command.split()[3:]))
    same_result(straight[0], run)


def test_malformed_rows_that_are_allowed_are_told_and_listed(world, capsys) -> None:
    rows = world / "one_bad.jsonl"
    rows.write_text((world / "train.jsonl").read_text() + '{"prompt": "1+1", "completions": ["2"], "labels": [1.7]}\n')
    given = arguments(world, "one_bad", train_data=rows, eval_fraction=0, max_bad_rows=1, max_steps=1)
    assert train.main(flags.parse(train.TrainConfig, ["train", *given, "--compile_cache_dir="])) == 0
    assert "1 malformed rows skipped" in capsys.readouterr().out
    (listed,) = json.loads((world / "one_bad" / "corpus.json").read_text())["bad_rows"]
    assert re.match(r"one_bad.jsonl:\d+: .*1\.7", listed)


def refused(arguments: list[str]) -> str:
    with pytest.raises(UserError) as error:
        # Without the cache, which the other tests of this process would inherit.
        train.main(flags.parse(train.TrainConfig, ["train", *arguments, "--compile_cache_dir="]))
    return str(error.value)


def test_refusals(world, straight) -> None:
    given = arguments(world, "straight")
    assert "holds another run" in refused(given)
    text = refused([*given, "--resume=auto", "--learning_rate=0.5", "--batch_size=5", "--loss=mse"])
    for changed in ("learning_rate was 0.01 and is 0.5", "batch_size was 6 and is 5", "loss was q_ranking and is mse"):
        assert changed in text
    other = world / "other.jsonl"
    write_corpus(other, 31)
    assert "--resume" in refused([*given, "--resume=auto", f"--train_data={other}"])
    assert "holds no run to go on with" in refused([*arguments(world, "nothing"), "--resume=always"])
    assert "--platform=gpu" in refused([*arguments(world, "nothing"), "--platform=gpu"])
    assert "--mesh=data=3" in refused([*arguments(world, "nothing"), "--mesh=data=3"])
    assert "safetensors" in refused([*arguments(world, "nothing"), "--init=pretrained"])
    assert "synthetic stands alone" in refused([*arguments(world, "nothing"), "--train_data=synthetic,a.jsonl"])
    assert "--train_data is empty" in refused([*arguments(world, "nothing"), "--train_data="])
    assert "--marker='two' is not exactly one token" in refused([*arguments(world, "nothing"), "--marker=two"])
    assert "--max_length=40000 is beyond the model's max_position_embeddings=" in refused(
        [*arguments(world, "nothing"), "--max_length=40000"]
    )
    assert "two.jsonl: no such file" in refused([*arguments(world, "nothing"), f"--train_data={world}/two.jsonl"])
    # Two seeds must not be one.
    assert "not an integer in the range [0, 4294967295]" in refused([*arguments(world, "nothing"), f"--seed={2**32}"])
    small = world / "small"
    write_model(small)
    (small / "config.json").write_text((small / "config.json").read_text().replace("264", "200"))
    assert "the model's vocab_size is 200" in refused([*arguments(world, "nothing"), f"--model={small}"])
    assert not (world / "nothing" / "config.json").exists()


def test_candidates_that_the_table_cannot_use_are_refused_before_training(world) -> None:
    candidates = world / "candidates.jsonl"
    row = {"id": "1", "question": "q", "answer": "2", "candidates": [{"text": "2", "correct": True}, {"text": "3"}]}
    candidates.write_text(json.dumps(row))
    given = [*arguments(world, "nothing"), f"--bon_candidates={candidates}"]
    assert 'candidates.jsonl:1: candidate 1 has no "correct"' in refused([*given, "--bon_n=2"])
    assert "2 candidates, but --bon_n wants to choose among 4" in refused([*given, "--bon_n=4"])
    assert "--bon_n: 'x' is not a positive whole number" in refused([*given, "--bon_n=x"])
    assert not (world / "nothing").exists()


def test_a_run_that_goes_on_is_left_alone(world) -> None:
    with run_directory.locked(world / "busy", "never"):
        assert "another process is training there" in refused(arguments(world, "busy"))
    assert [path.name for path in (world / "busy").iterdir()] == ["lock"]


def test_held_out_solutions_of_one_step_are_no_error_for_a_coarse_to_fine_run(world, tmp_path) -> None:
    """Evaluation is at the finest granularity, so what has no coarser sample is evaluated all the same."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "q", "completions": ["a"], "labels": [1]}))
    config = flags.parse(train.TrainConfig, ["train", *arguments(world, "nothing"), f"--eval_data={held_out}"])
    mesh = sharding.make_mesh(config.device, jax.devices()[:1])
    tokenizer = load_tokenizer(world / "model")
    said: list[str] = []
    data = train.open_data(config, train.materialise(config, tmp_path), tokenizer, mesh, said.append)
    assert [batch.trajectories for batch in data.held_out] == [1]
    assert "held out    1 trajectories" in said


def test_synthetic_stands_for_files_made_from_the_seed(tmp_path) -> None:
    """The embedded default needs no file: model without weights, own held-out problems, candidates."""
    config = flags.parse(train.TrainConfig, ["train", "--bon_candidates=synthetic"])
    sources = train.materialise(config, tmp_path)
    assert sources.init == "random"
    assert (sources.model / "config.json").is_file()
    files = [*sources.train, *sources.held_out, sources.candidates]
    assert len(set(files)) == 3
    assert all(pathlib.Path(file).parent == tmp_path / "synthetic" for file in files)
    named = flags.parse(train.TrainConfig, ["train", "--model=m", "--train_data=a,b", "--eval_data=c"])
    assert train.materialise(named, tmp_path) == train.Sources(pathlib.Path("m"), "pretrained", ("a", "b"), ("c",), "")
