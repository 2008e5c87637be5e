"""The score command, end to end with a small exported PRM."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from exported_prm import export_random
from safetensors.numpy import load_file, save_file

import cfprm_jax
from cfprm_jax import flags, score, synthetic

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=3, solutions_per_problem=2, candidates_per_problem=8)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)


@pytest.fixture(scope="module")
def prm(world, tmp_path_factory):
    return export_random(world.model, tmp_path_factory.mktemp("export") / "prm")


def run(*arguments):
    return flags.run(
        score.ScoreConfig, score.main, ["score", "--dtype=float32", "--mesh=data=2", "--compile_cache_dir=", *arguments]
    )


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def rows(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return [json.loads(line) for line in file]


def test_candidates_are_scored_as_the_python_interface_scores_them(prm, world, tmp_path, capsys):
    output, texts = tmp_path / "new" / "scored.jsonl.gz", tmp_path / "texts.jsonl"
    lines = "\n".join(rows(world.candidates)[0]["candidates"][0]["steps"])
    row = {"id": "lines", "question": "start=one", "answer": "one", "candidates": [{"text": lines}, {"text": "so"}]}
    texts.write_text(json.dumps(row) + "\n")
    assert run(f"--model={prm}", f"--input={world.candidates},{texts}", f"--output={output}") == 0
    *scored, split = rows(output)
    assert [len(candidate["step_scores"]) for candidate in split["candidates"]] == [1, 1]
    given = rows(world.candidates)
    assert [row["id"] for row in scored] == [row["id"] for row in given]
    reference = cfprm_jax.load(prm)
    for row, before in zip(scored, given, strict=True):
        for candidate, original in zip(row["candidates"], before["candidates"], strict=True):
            assert original.items() <= candidate.items()
            assert candidate.keys() - original.keys() == {"step_scores", "step_logits"}
        expected = reference.score(row["question"], row["candidates"][0]["steps"])
        np.testing.assert_allclose(row["candidates"][0]["step_scores"], expected, rtol=1e-5)
    out = capsys.readouterr().out
    assert 'one step    1 of 2 texts are one step although they contain line breaks: the separator is "\\n\\n"' in out
    assert "4 rows, 26 solutions" in out and "0 without steps, 0 over 96 tokens" in out
    config = json.loads((tmp_path / "new" / "scored.jsonl.gz.config.json").read_text())
    assert config["model"] == str(prm) and config["dtype"] == "float32" and config["encoding"] == "cfprm"
    assert "encoding    cfprm (prm.json)" in out
    assert {path.name for path in output.parent.iterdir()} == {output.name, f"{output.name}.config.json"}


def test_stepwise_rows_and_what_is_too_long(prm, world, tmp_path, capsys):
    output = tmp_path / "scored.jsonl"
    arguments = [
        f"--model={prm}",
        f"--input={world.train}",
        f"--output={output}",
        "--max_length=20",
        "--packing=sequence",
    ]
    assert run(*arguments) == 0
    scored = rows(output)
    assert len(scored) == 4
    missing = [row for row in scored if row["step_logits"] is None]
    assert 0 < len(missing) < 4
    assert f"{len(missing)} over 20 tokens" in capsys.readouterr().out
    assert all(len(row["step_scores"]) == len(row["completions"]) for row in scored if row not in missing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint=run"], "--checkpoint (a run of train)"),
        (["--model="], "--checkpoint (a run of train)"),
        (["--input="], "--input is empty"),
        (["--output="], "--output is empty"),
        (["--model=/nowhere"], "/nowhere is not a directory"),
        (["--input=/nowhere.jsonl"], "/nowhere.jsonl: no such file"),
        (["--packing=forest"], "packing"),
        (["--row_length=64"], "--row_length=64 is shorter than the model's max_length=96"),
        (["--mesh=data=3"], "--mesh=data=3"),
        (["--encoding=trl"], "--encoding=trl, but "),
        (["--encoding=orm"], "encoding"),
        (["--step_separator=ab"], "with other steps need them as a list"),
    ],
)
def test_bad_input_is_one_line_and_status_2(prm, world, tmp_path, capsys, arguments, message):
    output = tmp_path / "scored.jsonl"
    assert run(f"--model={prm}", f"--input={world.candidates}", f"--output={output}", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not output.exists()


def test_a_bad_row_leaves_no_output_behind(prm, world, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(world.candidates.read_text().splitlines()[0] + '\n{"question": "?"}\n')
    output = tmp_path / "out" / "scored.jsonl"
    assert run(f"--model={prm}", f"--input={bad}", f"--output={output}") == 2
    assert "bad.jsonl:2: neither a candidates row" in capsys.readouterr().err
    assert list(output.parent.iterdir()) == []


def test_an_output_that_exists_is_kept(prm, world, tmp_path, capsys):
    output = tmp_path / "scored.jsonl"
    output.write_text("precious")
    for resume, reason in (("never", f"--output={output} "), ("auto", "scored.jsonl.config.json")):
        assert run(f"--model={prm}", f"--input={world.candidates}", f"--output={output}", f"--resume={resume}") == 2
        assert reason in capsys.readouterr().err and output.read_text() == "precious"


def test_an_output_of_another_model_is_not_resumed(prm, world, tmp_path, capsys):
    output = tmp_path / "scored.jsonl"
    assert run(f"--model={prm}", f"--input={world.candidates}", f"--output={output}") == 0
    other = tmp_path / "prm"
    shutil.copytree(prm, other)
    tensors = load_file(other / "model.safetensors")
    tensors["score.bias"] = tensors["score.bias"] + 1
    save_file(tensors, other / "model.safetensors")
    assert run(f"--model={other}", f"--input={world.candidates}", f"--output={output}", "--resume=auto") == 2
    assert "another model" in capsys.readouterr().err
    assert run(f"--model={prm}", f"--input={world.candidates}", f"--output={output}", "--resume=auto") == 0
    assert capsys.readouterr().out.startswith(f"scores      {output} ")


@pytest.mark.parametrize("suffix", ["", pytest.param(".gz", marks=pytest.mark.slow)])
def test_killed_at_random_points_the_file_is_the_same(prm, world, tmp_path, suffix):
    """Some hundred rows, in groups of 512 solutions; the process is killed while it writes."""
    many = tmp_path / "many.jsonl"
    text = world.candidates.read_text()
    many.write_text("".join(text.replace("held_out", f"copy{number}") for number in range(80)))
    arguments = [f"--model={prm}", "--dtype=float32", "--mesh=data=1", f"--input={many}", "--resume=auto"]
    arguments += [f"--compile_cache_dir={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "cfprm_jax.score", *arguments]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(output):
        return subprocess.Popen(
            [*command, f"--output={output}"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    straight, killed = tmp_path / f"straight.jsonl{suffix}", tmp_path / f"killed.jsonl{suffix}"
    process = start(straight)
    assert process.wait() == 0, process.stderr.read()
    partial = killed.with_name(f"{killed.name}.partial")
    for written in (130,) if not suffix else (70,):
        process = start(killed)
        while process.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") >= written):
            time.sleep(0.0005)
        process.kill()
        assert process.wait() in (-9, 0), process.stderr.read()
    process = start(killed)
    assert process.wait() == 0, process.stderr.read()
    assert killed.read_bytes() == straight.read_bytes() and len(rows(killed)) == 240
