"""The train command: real runs of a tiny model in processes of their own, killed, stopped, resumed, refused."""

from __future__ import annotations

import json
import pathlib
import random
import re
import signal

import pytest
from documented_keys import check as check_keys
from tiny_runs import before_step, finish, rows, same_result, wait_for_step, write_corpus, write_model

from cfprm_jax import flags, train
from cfprm_jax.errors import UserError
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.run import directory
from cfprm_jax.runtime import config_files


@pytest.fixture(scope="module")
def world(tiny) -> pathlib.Path:
    return tiny.directory


@pytest.fixture(scope="module")
def straight(tiny) -> tuple[pathlib.Path, str]:
    """An undisturbed run and what it printed."""
    return tiny.straight()


def test_a_run(world, straight) -> None:
    """The log, the files of the run, coarse before fine, and loading for scoring."""
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
    check_keys("metrics.jsonl", *map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    check_keys("corpus.json", json.loads((run / "corpus.json").read_text()))
    final = rows(run)[-1]
    assert final["step"] == len(steps)
    assert 0 <= final["eval_step_accuracy"] <= 1
    assert steps[-1]["loss"] < steps[order.index(1)]["loss"] + 1
    assert {p.name for p in run.iterdir()} >= {"config.json", "run.flags", "metrics.jsonl", "tensorboard", "model"}
    loaded = loaded_prm.load_for_inference(run, "bfloat16")
    assert loaded.meta["step"] == len(steps)
    assert loaded.meta["loss"] == "q_ranking"
    assert loaded.encoding.system_prompt == "Score."
    assert loaded.params["backbone"]["embedding"].dtype == "bfloat16"
    assert loaded.params["head"]["output"]["kernel"].dtype == "float32"
    assert len(loaded.tokenizer("<extra_0>")["input_ids"]) == 1
    older = min(int(p.name) for p in (run / "checkpoints").iterdir())
    assert loaded_prm.load_for_inference(run / "checkpoints" / str(older)).meta["step"] == older < len(steps)
    again = flags.parse(train.TrainConfig, ["train", f"--flagfile={run / 'run.flags'}"])
    assert json.loads(json.dumps(config_files.as_dict(again))) == json.loads((run / "config.json").read_text())


def test_killed_it_comes_to_the_same_end(tiny, straight) -> None:
    """kill -9 after a random step; losses and parameters bit-equal to those of the undisturbed run.

    bench/kill_and_resume.py does this many times, also during saves.
    """
    total = rows(straight[0])[-1]["step"]
    run, given = tiny.directory / "killed", tiny.arguments("killed")
    process = tiny.start(given, patch=before_step(total))
    wait_for_step(process, run, random.randint(4, total - 4))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resume      " in finish(tiny.start([*given, "--resume=auto"]))
    same_result(straight[0], run)


@pytest.mark.slow
def test_sigterm_saves_and_prints_how_to_resume(tiny, straight) -> None:
    run, given = tiny.directory / "stopped", tiny.arguments("stopped", checkpoint_every=1000)
    process = tiny.start(given, patch=before_step(9))
    wait_for_step(process, run, 5)
    process.send_signal(signal.SIGTERM)
    tiny.release(process)
    text = finish(process)
    command = f"python -m cfprm_jax.train --flagfile={run}/run.flags --resume=auto"
    assert f"resume with: {command}" in text
    assert len(rows(run)) < len(rows(straight[0]))
    finish(tiny.start(command.split()[3:]))
    same_result(straight[0], run)


def test_malformed_rows_that_are_allowed_are_reported_and_listed(tiny, world, capsys) -> None:
    rows = world / "one_bad.jsonl"
    rows.write_text((world / "train.jsonl").read_text() + '{"prompt": "1+1", "completions": ["2"], "labels": [1.7]}\n')
    given = tiny.arguments("one_bad", train_data=rows, eval_fraction=0, max_bad_rows=1, max_steps=1)
    assert train.main(flags.parse(train.TrainConfig, ["train", *given, "--compile_cache_dir="])) == 0
    assert "1 malformed row skipped" in capsys.readouterr().out
    (listed,) = json.loads((world / "one_bad" / "corpus.json").read_text())["bad_rows"]
    assert re.match(r"one_bad.jsonl:\d+: .*1\.7", listed)


def test_malformed_rows_of_the_held_out_corpus_too(tiny, world, capsys) -> None:
    rows = world / "bad_held_out.jsonl"
    rows.write_text((world / "train.jsonl").read_text() + '{"prompt": "1+1", "completions": ["2"], "labels": [1.7]}\n')
    given = tiny.arguments("bad_held_out", eval_data=rows, max_bad_rows=1, max_steps=1)
    assert train.main(flags.parse(train.TrainConfig, ["train", *given, "--compile_cache_dir="])) == 0
    assert re.search(r"held out .*1 malformed row skipped", capsys.readouterr().out)
    counts = json.loads((world / "bad_held_out" / "corpus.json").read_text())
    (listed,) = counts["held_out"]["bad_rows"]
    assert re.match(r"bad_held_out.jsonl:\d+: .*1\.7", listed) and not counts["bad_rows"]


def refused(arguments: list[str]) -> str:
    with pytest.raises(UserError) as error:
        # Without the cache, which the other tests of this process would inherit.
        train.main(flags.parse(train.TrainConfig, ["train", *arguments, "--compile_cache_dir="]))
    return str(error.value)


def test_refusals(tiny, world, straight) -> None:
    given = tiny.arguments("straight")
    assert "holds another run" in refused(given)
    text = refused([*given, "--resume=auto", "--learning_rate=0.5", "--batch_size=5", "--loss=mse"])
    for changed in ("learning_rate was 0.01 and is 0.5", "batch_size was 6 and is 5", "loss was q_ranking and is mse"):
        assert changed in text
    other = world / "other.jsonl"
    write_corpus(other, 31)
    assert "--resume" in refused([*given, "--resume=auto", f"--train_data={other}"])
    assert "--resume=always: " in refused([*tiny.arguments("nothing"), "--resume=always"])
    assert "--platform=gpu" in refused([*tiny.arguments("nothing"), "--platform=gpu"])
    assert "--mesh=data=3" in refused([*tiny.arguments("nothing"), "--mesh=data=3"])
    assert "safetensors" in refused([*tiny.arguments("nothing"), "--init=pretrained"])
    assert "--train_data=synthetic,a.jsonl" in refused([*tiny.arguments("nothing"), "--train_data=synthetic,a.jsonl"])
    assert "--train_data is empty" in refused([*tiny.arguments("nothing"), "--train_data="])
    assert "--marker='two' is not exactly one token" in refused([*tiny.arguments("nothing"), "--marker=two"])
    assert "--max_length=40000 is beyond the model's max_position_embeddings=" in refused(
        [*tiny.arguments("nothing"), "--max_length=40000"]
    )
    assert "two.jsonl: no such file" in refused([*tiny.arguments("nothing"), f"--train_data={world}/two.jsonl"])
    # Two seeds must not be one.
    assert f"--seed={2**32} is outside its bounds" in refused([*tiny.arguments("nothing"), f"--seed={2**32}"])
    small = world / "small"
    write_model(small)
    (small / "config.json").write_text((small / "config.json").read_text().replace("264", "200"))
    assert "the model's vocab_size is 200" in refused([*tiny.arguments("nothing"), f"--model={small}"])
    assert not (world / "nothing" / "config.json").exists()


def test_candidates_that_the_table_cannot_use_are_refused_before_training(tiny, world) -> None:
    candidates = world / "candidates.jsonl"
    row = {"id": "1", "question": "q", "answer": "2", "candidates": [{"text": "2", "correct": True}, {"text": "3"}]}
    candidates.write_text(json.dumps(row))
    given = [*tiny.arguments("nothing"), f"--bon_candidates={candidates}"]
    assert 'candidates.jsonl:1: candidate 1 has no "correct"' in refused([*given, "--bon_n=2"])
    assert re.search("2 candidates, .*--bon_n.* 4", refused([*given, "--bon_n=4"]))
    assert "--bon_n: 'x' is not a whole number from 1" in refused([*given, "--bon_n=x"])
    assert not (world / "nothing").exists()


def test_a_run_in_progress_is_not_touched(tiny, world) -> None:
    with directory.locked(world / "busy", "never"):
        # Before weights, tokenizer or corpus are looked at.
        assert "another process is training there" in refused([*tiny.arguments("busy"), "--model=nowhere"])
        assert [path.name for path in (world / "busy").iterdir()] == ["lock"]
    assert not (world / "busy").exists()
