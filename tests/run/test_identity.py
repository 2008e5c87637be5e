"""What a resumed run compares: the content of its model and data, not where they are."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import types

import numpy as np
import pytest
from safetensors.numpy import save_file

from cfprm_jax.config import LoraConfig
from cfprm_jax.errors import UserError
from cfprm_jax.run import identity
from cfprm_jax.run.inputs import Sources
from cfprm_jax.run.options import TrainConfig

RAW = {"model_type": "qwen2", "hidden_size": 8, "_name_or_path": "a"}


def sources(model: pathlib.Path, init: str = "pretrained") -> Sources:
    return Sources(model, init, (), (), "")


@pytest.fixture
def model(tmp_path) -> pathlib.Path:
    (tmp_path / "model").mkdir()
    save_file({"model.norm.weight": np.arange(8, dtype=np.float32)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def meta(path: str, content: str | None) -> dict:
    return {"fingerprint": json.loads(json.dumps({"model": path, identity.MODEL_CONTENT: content, "seed": 1}))}


def test_a_model_is_identified_by_its_content(model, tmp_path) -> None:
    content = identity.model_content(sources(model), RAW)
    moved = shutil.copytree(model, tmp_path / "moved")
    assert identity.model_content(sources(moved), {**RAW, "_name_or_path": "b"}) == content is not None
    assert identity.model_content(sources(model), {**RAW, "hidden_size": 9}) != content
    assert identity.model_content(sources(model, "random"), RAW) not in (content, None)
    save_file({"model.norm.weight": np.ones(8, np.float32)}, moved / "model.safetensors")
    assert identity.model_content(sources(moved), RAW) != content
    (moved / "model.safetensors").unlink()
    assert identity.model_content(sources(moved), RAW) is None


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (("a", "x"), ("b", "x"), None),
        (("a", "x"), ("a", "y"), "content of the model was x and is y"),
        (("a", "x"), ("a", None), None),  # its weights are gone, and not needed
        (("a", "x"), ("b", None), "model was a and is b"),
        # Paths are not cut: these differ at their end.
        (
            (f"{'models/' * 9}a", "x"),
            (f"{'models/' * 9}b", None),
            f"model was {'models/' * 9}a and is {'models/' * 9}b",
        ),
        (("a", None), ("a", "y"), None),
        (("a", None), ("b", "y"), "model was a and is b"),
    ],
)
def test_a_run_is_refused_by_content_where_it_is_known(saved, now, message) -> None:
    current = meta(*now)["fingerprint"]
    if message is None:
        identity.require_same(pathlib.Path("run"), meta(*saved), current)
        return
    with pytest.raises(UserError, match=message):
        identity.require_same(pathlib.Path("run"), meta(*saved), current)


def test_runs_of_earlier_versions_are_identified_by_the_path() -> None:
    current = meta("a", "x")["fingerprint"]
    identity.require_same(pathlib.Path("run"), {"fingerprint": {"model": "a", "seed": 1}}, current)
    with pytest.raises(UserError, match="model was b and is a"):
        identity.require_same(pathlib.Path("run"), {"fingerprint": {"model": "b", "seed": 1}}, current)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"loss": "bce"}, {"margin": 2.0}),
        ({"decay": "constant"}, {"final_rate_fraction": 0.5}),
        ({"granularities": ["1"]}, {"schedule": "shuffled", "window_tail": "drop", "window_stride": "1"}),
        ({"granularities": ["whole", "1"]}, {"window_tail": "drop"}),
    ],
)
def test_options_without_effect_of_earlier_versions_are_no_difference(options, idle) -> None:
    defaults = {"margin": 4.0, "final_rate_fraction": 0.0, "window_tail": "keep", "window_stride": "window"}
    today = {**defaults, "schedule": "coarse_to_fine", "loss": "q_ranking", "decay": "cosine", "granularities": ["2,1"]}
    today |= {identity.MODEL_CONTENT: "x"}
    identity.require_same(pathlib.Path("run"), {"fingerprint": {**today, **options, **idle}}, {**today, **options})
    name, value = next(iter(idle.items()))
    with pytest.raises(UserError, match=f"{name} was {value} and is {today[name]}"):
        identity.require_same(pathlib.Path("run"), {"fingerprint": {**today, name: value}}, today)


def with_adapters(model: pathlib.Path, *targets: str) -> dict:
    """The fingerprint of a run with adapters on these targets."""
    config = dataclasses.replace(TrainConfig(), lora=LoraConfig(2, 8.0, targets))
    made = types.SimpleNamespace(
        data=types.SimpleNamespace(loader=types.SimpleNamespace(fingerprint={"seed": 1, "sizes": (4, 1)})),
        frozen={"lora": {"backbone_sha256": "a"}},
        sources=sources(model),
        network=types.SimpleNamespace(raw=RAW),
        num_steps=3,
    )
    return identity.fingerprint(config, made)


def test_a_fingerprint_with_adapters_is_the_same_after_json(model) -> None:
    """Whatever is a list there; targets are the same by both of their names and in any order."""
    saved = json.loads(json.dumps(with_adapters(model, "value", "q_proj")))
    run = pathlib.Path("run")
    for targets in (("value", "q_proj"), ("query", "v_proj")):
        identity.require_same(run, {"fingerprint": saved}, with_adapters(model, *targets))
    # As earlier versions wrote them: as they were typed.
    identity.require_same(
        run, {"fingerprint": {**saved, "lora_targets": ["value", "q_proj"]}}, with_adapters(model, "value", "query")
    )
    with pytest.raises(UserError, match=r"lora_targets was .* and is "):
        identity.require_same(run, {"fingerprint": saved}, with_adapters(model, "query"))


def test_options_of_earlier_versions_without_effect_do_not_count() -> None:
    """Which are refused now, so that a resumed run cannot have them."""
    saved = {
        "packing": "none",
        "record_chunk": 0,
        "loss": "bce",
        "label_weight": "node",
        "ranking_negatives": "question",
    }
    current = {**saved, "record_chunk": 1, "ranking_negatives": "path", identity.MODEL_CONTENT: None}
    identity.require_same(pathlib.Path("run"), {"fingerprint": saved}, current)
    in_trees = {"packing": "tree"}
    with pytest.raises(UserError, match="record_chunk was 0 and is 1"):
        identity.require_same(pathlib.Path("run"), {"fingerprint": saved | in_trees}, current | in_trees)
