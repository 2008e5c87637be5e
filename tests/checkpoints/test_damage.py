"""Checkpoints with corrupted files: every loader raises one line, or logs which other checkpoint is used."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import random
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import write_model as write_backbone

from cfprm_jax import export, flags, process_bench, score
from cfprm_jax.checkpoints import model_files, orbax_files, saving
from cfprm_jax.checkpoints.model_files import write_model
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig, OptimizerConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.inference.load import open_prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params, param_specs
from cfprm_jax.training.optimizer import AdamW
from cfprm_jax.training.step import TrainState

ENCODING = EncodingConfig(max_length=64, system_prompt="")


class Run:
    """A run directory with checkpoints 1 and 2, and what is in them."""

    def __init__(self, directory: pathlib.Path, optimizer: str) -> None:
        backbone = directory / "backbone"
        backbone.mkdir(parents=True)
        write_backbone(backbone)
        config, raw = loading.read_config(backbone)
        tokenizer = load_tokenizer(backbone)
        self.path = directory / "run"
        dtype = "float32" if optimizer == "adamw" else "bfloat16"
        model = ModelConfig(dtype=dtype)
        write_model(
            self.path,
            raw,
            tokenizer,
            model=model,
            encoding=ENCODING,
            loss=LossConfig(),
            granularity=GranularityConfig(),
        )
        network = PRMConfig(config, dtype=dtype)
        chosen = AdamW(OptimizerConfig(optimizer=optimizer), lambda step: 0.0, param_specs(network))
        self.states: dict[int, TrainState] = {}
        with contextlib.closing(saving.Checkpoints(self.path, keep=2)) as checkpoints:
            for step in (1, 2):
                params = init_params(network, jax.random.key(step))
                state = TrainState(*chosen.init(params), jnp.int32(step))
                self.states[step] = jax.tree.map(np.asarray, state)
                checkpoints.save(step, state, {"next": step}, {"metrics": None})
        self.abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
            ),
            self.states[1],
        )
        self.loaded = {step: loaded_prm.load_for_inference(self.path / "checkpoints" / str(step)) for step in (1, 2)}


@pytest.fixture(scope="module", params=["adamw", pytest.param("adamw_compact", marks=pytest.mark.slow)])
def run(request, tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp(request.param), request.param)


def same(found, expected) -> None:
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


def described(loaded: loaded_prm.LoadedPRM) -> tuple:
    """All that scores depend on beside the weights."""
    texts = ["What is 2 + 3?", "5\n\n<extra_0>"]
    tokens = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    meta = {name: value for name, value in loaded.meta.items() if name != "step"}
    return loaded.config, loaded.encoding, meta, tokens, prompt


def newest(run: Run, path: pathlib.Path) -> None:
    """Weights of 2 without a word, or those of 1 with a line that names 2."""
    logged: list[str] = []
    loaded = loaded_prm.load_for_inference(path, log=logged.append)
    step = loaded.meta["step"]
    assert described(loaded) == described(run.loaded[step])
    same(loaded.params, run.loaded[step].params)
    if step == 1:
        (line,) = logged
        assert f"checkpoint {path}/checkpoints/2 " in line
        assert line.endswith(f"; {path}/checkpoints/1 is used instead") and "\n" not in line
    else:
        assert logged == []


def explicit(run: Run, path: pathlib.Path) -> None:
    """Weights of 2 or none."""
    loaded = open_prm(path / "checkpoints" / "2", log=pytest.fail)
    assert described(loaded) == described(run.loaded[2])
    same(loaded.params, run.loaded[2].params)


def resume(run: Run, path: pathlib.Path) -> None:
    """The state of 2 without a word, or that of 1 with a line that names 2."""
    logged: list[str] = []
    with contextlib.closing(saving.Checkpoints(path, keep=2)) as checkpoints:
        restored = checkpoints.restore_newest(run.abstract, log=logged.append)
    same(restored.state, run.states[restored.step])
    assert restored.data == {"next": restored.step}
    assert len(logged) == 2 - restored.step and all("/checkpoints/2 " in line for line in logged)


def mutations(raw: bytes, rng: random.Random, bits: int) -> dict[str, bytes | None]:
    out: dict[str, bytes | None] = {"gone": None, "emptied": b"", "halved": raw[: len(raw) // 2]}
    for bit in rng.sample(range(8 * len(raw)), min(bits, 8 * len(raw))):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        out[f"bit {bit}"] = bytes(flipped)
    return {name: changed for name, changed in out.items() if changed != raw}


@pytest.mark.parametrize("part", ["checkpoints/2", "model"])
def test_damaged_weights_are_never_loaded(run: Run, part: str, tmp_path) -> None:
    rng, number = random.Random(0), 0
    loaders = (newest, explicit, resume) if part != "model" else (newest, explicit)
    path = tmp_path / "run"
    shutil.copytree(run.path, path, symlinks=True)
    outcomes = dict.fromkeys(("equal or logged", "refused"), 0)
    for file in sorted(file for file in (run.path / part).rglob("*") if file.is_file()):
        here = path / file.relative_to(run.path)
        raw = file.read_bytes()
        # What is in a file of arrays may be read as weights.
        for what, changed in mutations(raw, rng, bits=4 if file.parent.name == "d" else 1).items():
            load = loaders[number % len(loaders)]
            number += 1
            if changed is None:
                here.unlink()
            else:
                here.write_bytes(changed)
            try:
                load(run, path)
                outcomes["equal or logged"] += 1
            except UserError as error:
                assert "\n" not in str(error) and str(path) in str(error), f"{here}: {what}: {error}"
                outcomes["refused"] += 1
            except BaseException as error:
                raise AssertionError(f"{load.__name__} of {here}: {what}") from error
            aside = path / "checkpoints" / "2.damaged"
            if aside.exists():
                aside.rename(path / "checkpoints" / "2")
            here.write_bytes(raw)
    assert number > (50 if part != "model" else 15) and outcomes["refused"] > 10, (number, outcomes)


def rotated(folder: pathlib.Path, run: Run) -> None:
    """A checkpoint whole by Orbax, whose embedding's rows have changed places: sums of values do not see it."""
    meta = orbax_files.read_json(folder, "meta")
    data = orbax_files.read_json(folder, "data")
    state = run.states[2]
    params = {**state.params, "backbone": {**state.params["backbone"]}}
    params["backbone"]["embedding"] = np.roll(params["backbone"]["embedding"], 1, axis=0)
    moved = jax.tree.map(jnp.asarray, state._replace(params=params))
    shutil.rmtree(folder)
    with contextlib.closing(saving.Checkpoints(folder.parent.parent, keep=2)) as checkpoints:
        checkpoints.save(2, moved, data, {"metrics": None})
    orbax_files.replace_json(folder, "meta", meta)


def test_values_that_have_changed_places_are_seen_by_all(run: Run, tmp_path) -> None:
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    rotated(path / "checkpoints" / "2", run)
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged: changed on disk: params/backbone/embedding$"):
        explicit(run, path)
    newest(run, path)
    with pytest.warns(UserWarning, match=r"checkpoints/2 is damaged: .*checkpoints/1 is used instead"):
        assert open_prm(path).meta["step"] == 1
    resume(run, path)
    assert (path / "checkpoints" / "2.damaged").is_dir()


ROW = {"id": "1", "question": "2 + 3?", "answer": "5", "candidates": [{"steps": ["2 + 3 = 5", "5"]}]}
BENCH_ROW = {"id": "math-0", "problem": "2 + 3?", "steps": ["2 + 3 = 5", "5"], "label": -1}


def command(name: str, checkpoint: pathlib.Path, output: pathlib.Path) -> int:
    """score, export or process_bench, of a checkpoint, into output."""
    rows = output.parent / f"{name}.json"
    rows.write_text(json.dumps(ROW if name == "score" else BENCH_ROW) + "\n")
    module, config = {
        "score": (score, score.ScoreConfig),
        "export": (export, export.ExportConfig),
        "process_bench": (process_bench, process_bench.ProcessBenchConfig),
    }[name]
    flag = f"--output={output / 'scored.jsonl'}" if name == "score" else f"--output_dir={output}"
    given = [] if name == "export" else [f"--input={rows}"]
    return flags.run(config, module.main, [name, f"--checkpoint={checkpoint}", flag, *given])


@pytest.mark.parametrize("name", ["score", "export", "process_bench"])
def test_commands_refuse_it_or_log_which_is_used(run: Run, name: str, tmp_path, capsys, monkeypatch) -> None:
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    assert command(name, path / "checkpoints" / "1", tmp_path / "one") == 0
    assert "is used instead" not in capsys.readouterr().out
    rotated(path / "checkpoints" / "2", run)
    assert command(name, path / "checkpoints" / "2", tmp_path / "two") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: checkpoint {path}/checkpoints/2 is damaged: changed on disk: params/")
    assert error.count("\n") == 1
    assert not (tmp_path / "two").exists() or not list((tmp_path / "two").iterdir())
    assert command(name, path, tmp_path / "newest") == 0
    out = capsys.readouterr().out
    assert f"checkpoints/2 is damaged: changed on disk: params/backbone/embedding; {path}/checkpoints/1 is used" in out
    result = {"score": "scored.jsonl", "export": "model.safetensors", "process_bench": "predictions.jsonl"}[name]
    assert (tmp_path / "newest" / result).read_bytes() == (tmp_path / "one" / result).read_bytes()


def test_none_is_whole(run: Run, tmp_path) -> None:
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    for step in (1, 2):
        (path / "checkpoints" / str(step) / "meta" / "metadata").write_text("{}")
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged: .*; checkpoint .*checkpoints/1 is damaged: "):
        open_prm(path)
    assert {folder.name for folder in (path / "checkpoints").iterdir()} == {"1", "2"}


def test_checkpoints_of_earlier_versions_are_read_with_a_note(run: Run, tmp_path) -> None:
    """Their checksums are sums of bits."""
    path = tmp_path / "run"
    shutil.copytree(run.path, path)
    folder = path / "checkpoints" / "2"
    meta = orbax_files.read_json(folder, "meta")
    del meta["checksum_method"]
    flat = saving.ocp.tree.to_flat_dict(run.states[2], sep="/")
    meta["checksums"] = {
        name: int(np.asarray(value).view(f"u{value.dtype.itemsize}").astype(np.uint64).sum() % 2**32)
        for name, value in flat.items()
    }
    orbax_files.replace_json(folder, "meta", meta)
    (path / "model" / "checksums.json").unlink()
    logged: list[str] = []
    loaded = loaded_prm.load_for_inference(path, log=logged.append)
    same(loaded.params, run.loaded[2].params)
    (line,) = logged
    assert "checkpoints/2 is of an earlier version" in line
    logged.clear()
    with contextlib.closing(saving.Checkpoints(path, keep=2)) as checkpoints:
        same(checkpoints.restore_newest(run.abstract, log=logged.append).state, run.states[2])
    assert len(logged) == 1 and "is of an earlier version" in logged[0]


def test_the_place_of_a_backbone_may_be_changed_in_prm_json(tmp_path) -> None:
    run = Run(tmp_path, "adamw")
    prm = run.path / "model" / "prm.json"
    held = json.loads(prm.read_text())
    prm.write_text(json.dumps({**held, "dtype": "bfloat16"}))
    with pytest.raises(UserError, match=r"prm.json has changed since the run wrote it .*train --resume=auto"):
        open_prm(run.path)
    _, raw = loading.read_config(run.path / "model")
    lora = {"lora": {"rank": 1, "backbone": "here"}}
    write_model(
        run.path,
        raw,
        run.loaded[1].tokenizer,
        model=ModelConfig(),
        encoding=ENCODING,
        loss=LossConfig(),
        granularity=GranularityConfig(),
        frozen=lora,
    )
    model_files.check_model(run.path / "model")
    prm.write_text(prm.read_text().replace('"here"', '"there"'))
    model_files.check_model(run.path / "model")
    prm.write_text(prm.read_text().replace('"rank": 1', '"rank": 2'))
    with pytest.raises(UserError, match="has changed"):
        model_files.check_model(run.path / "model")


def test_no_warning_for_a_whole_run(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_prm(run.path).meta["step"] == 2
