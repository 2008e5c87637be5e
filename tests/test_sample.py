"""The sample command, end to end with a small random language model: rows, refusals, kills."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")
from tiny_policies import write_language_model

from cfprm_jax import flags, sample
from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.candidates import read_candidates

QUESTIONS = 6


def run(*arguments):
    return flags.run(sample.SampleConfig, sample.main, ["sample", "--compile_cache_dir=", "--mesh=data=1", *arguments])


@pytest.fixture(autouse=True)
def one_of_the_devices(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_language_model(tmp_path_factory.mktemp("lm"), tied=True)[0]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "mine.jsonl"
    rows = [
        {"id": i, "question": f"start=three+two-{'four' * i}", "answer": "one", "level": i} for i in range(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags_of(policy, questions, output, **changes):
    chosen = {"num_candidates": 5, "max_new_tokens": 24, "batch_rows": 8, "seed": 3, "system_prompt": "", **changes}
    return [f"--model={policy}", f"--questions={questions}", f"--output={output}"] + [
        f"--{name}={value}" for name, value in chosen.items()
    ]


@pytest.fixture(scope="module")
def expected(policy, questions, tmp_path_factory):
    output = tmp_path_factory.mktemp("out") / "candidates.jsonl"
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        assert run(*flags_of(policy, questions, output)) == 0
    return output


def test_rows_are_candidates_in_the_order_of_the_questions(expected, policy):
    rows = [json.loads(line) for line in expected.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(QUESTIONS))
    assert all(row["answer"] == "one" and row["level"] == row["id"] for row in rows)
    candidates = [candidate for row in rows for candidate in row["candidates"]]
    assert len(candidates) == 5 * QUESTIONS and all(set(c) == {"text", "finish", "tokens"} for c in candidates)
    assert all(c["tokens"] == 24 if c["finish"] == "length" else c["tokens"] <= 24 for c in candidates)
    assert len(list(read_candidates(expected))) == QUESTIONS
    config = json.loads((expected.parent / "candidates.jsonl.config.json").read_text())
    assert config["num_candidates"] == 5 and set(config["fingerprint"]) == {"model", "questions"}
    assert {path.name for path in expected.parent.iterdir()} == {"candidates.jsonl", "candidates.jsonl.config.json"}


def test_in_process_and_compressed_it_is_the_same(expected, policy, questions, tmp_path):
    output = tmp_path / "new" / "candidates.jsonl.gz"
    config = sample.SampleConfig(
        model=str(policy), questions=(str(questions),), output=str(output), num_candidates=5, max_new_tokens=24,
        batch_rows=8, seed=3, system_prompt="", device=DeviceConfig(compile_cache_dir=""),
    )  # fmt: skip
    assert sample.main(config) == 0
    assert gzip.decompress(output.read_bytes()) == expected.read_bytes()
    assert {path.name for path in output.parent.iterdir()} == {output.name, f"{output.name}.config.json"}


def test_a_row_that_was_cut_is_made_again(expected, policy, questions, tmp_path, capsys):
    output, text = tmp_path / "candidates.jsonl", expected.read_bytes()
    beside = tmp_path / "candidates.jsonl.config.json"
    beside.write_bytes((expected.parent / beside.name).read_bytes())
    lines = text.splitlines(keepends=True)
    (tmp_path / "candidates.jsonl.partial").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    arguments = flags_of(policy, questions, output)
    assert run(*arguments) == 2
    assert "(candidates.jsonl.partial)" in capsys.readouterr().err
    assert run(*arguments, "--seed=4", "--resume=auto") == 2
    assert "another --seed" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text(questions.read_text().replace("two", "one"))
    assert run(*arguments, f"--questions={other}", "--resume=auto") == 2
    assert "another questions" in capsys.readouterr().err
    assert run(*arguments, "--resume=always") == 0
    assert "; 2 questions" in capsys.readouterr().out
    assert output.read_bytes() == text
    assert run(*arguments, "--resume=auto") == 0
    assert capsys.readouterr().out.startswith(f"candidates  {output} ")
    assert run(*arguments) == 2
    assert f"--output={output} " in capsys.readouterr().err


def test_killed_at_random_points_the_file_is_the_same(expected, policy, questions, tmp_path):
    output, partial = tmp_path / "candidates.jsonl", tmp_path / "candidates.jsonl.partial"
    command = [
        *(sys.executable, "-m", "cfprm_jax.sample", "--mesh=data=1", f"--compile_cache_dir={tmp_path / 'cache'}"),
        *flags_of(policy, questions, output), "--resume=auto",
    ]  # fmt: skip
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    random.seed(0)
    for rows in (1, 3):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while process.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") >= rows):
            time.sleep(0.001)
        time.sleep(random.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode in (-signal.SIGKILL, 0), process.stderr.read()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert output.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model="], "--model is empty"),
        (["--questions="], "--questions is empty"),
        (["--output="], "--output is empty"),
        (["--model=/nowhere"], "/nowhere"),
        (["--questions=/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["--max_new_tokens=2045"], "mine.jsonl:1 and 5 more: prompt and --max_new_tokens=2045"),
        (["--temperature=-1"], "temperature"),
        (["--top_p=0"], "top_p"),
        (["--temperature=0", "--top_p=0.9"], "--top_p=0.9 is for a --temperature above 0"),
        (["--request_retries=1"], "--request_retries=1 is for policies behind --engine"),
        (["--engine_model=a"], "--engine_model=a is for policies elsewhere: --engine, --write_requests or"),
        (["--engine=http://x/v1"], "--batch_rows=8 is for sampling in this process"),
        (["--resume=always"], "--resume=always"),
        (["--mesh=data=3"], "--mesh=data=3"),
    ],
)
def test_bad_input_is_one_line_and_status_2(policy, questions, tmp_path, capsys, arguments, message):
    output = tmp_path / "out" / "candidates.jsonl"
    assert run(*flags_of(policy, questions, output), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not output.parent.exists() or list(output.parent.iterdir()) == []


def test_a_reward_model_is_no_policy(policy, questions, tmp_path, capsys):
    directory = tmp_path / "prm"
    directory.mkdir()
    for path in policy.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = tensors["model.norm.weight"].reshape(1, width)
    save_file(tensors, directory / "model.safetensors")
    assert run(*flags_of(directory, questions, tmp_path / "c.jsonl")) == 2
    assert "process reward model" in capsys.readouterr().err


def test_shares_merged_are_the_bytes_of_one_process(expected, policy, questions, tmp_path, capsys):
    for index in range(3):
        assert run(*flags_of(policy, questions, tmp_path / "c.jsonl"), f"--shard={index}/3") == 0
    assert run(f"--merge={tmp_path}/c.*.jsonl", f"--output={tmp_path}/merged.jsonl") == 0
    assert (tmp_path / "merged.jsonl").read_bytes() == expected.read_bytes()
    part = next(p for p in sorted(tmp_path.glob("c.*.jsonl")) if p.read_bytes().count(b"\n") > 1)
    part.write_bytes(b"".join(part.read_bytes().splitlines(keepends=True)[::-1]))
    capsys.readouterr()
    assert run(f"--merge={tmp_path}/c.*.jsonl", f"--output={tmp_path}/other.jsonl") == 2
    assert f"{part.name} has the question" in capsys.readouterr().err
