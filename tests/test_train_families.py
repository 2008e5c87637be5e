"""A whole run of train on each family, its exports in every format, and the libraries that load them."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from tiny_runs import TinyRuns, write_weights

import cfprm_jax
from cfprm_jax import export, flags, train
from cfprm_jax.errors import UserError
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.models.prm import apply

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen3": {"head_dim": 16},
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    },
    "mistral": {"sliding_window": 128, "tie_word_embeddings": False},
}
OPTIONS = {
    "init": "pretrained",
    "packing": "tree",
    "row_shapes": 1,
    "c_max": 1,
    "eval_fraction": 0,
    "batch_size": 24,
    "max_steps": 2,
}
QUESTION, STEPS = "What is 2?", ["1+1", "2"]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory, compiled_programs) -> TinyRuns:
    made = TinyRuns(tmp_path_factory.mktemp(request.param), compiled_programs)
    path = made.directory / "model" / "config.json"
    raw = {**json.loads(path.read_text()), "num_hidden_layers": 2, "model_type": request.param}
    path.write_text(json.dumps({**raw, **FAMILIES[request.param]}))
    write_weights(made.directory / "model")
    return made


def trained(tiny: TinyRuns, name: str, **options) -> pathlib.Path:
    given = tiny.arguments(name, **OPTIONS, **options)
    assert train.main(flags.parse(train.TrainConfig, ["train", *given, "--compile_cache_dir="])) == 0
    return tiny.directory / name


def exported(run: pathlib.Path, directory: pathlib.Path, format: str) -> pathlib.Path:
    given = [f"--checkpoint={run}", f"--output_dir={directory}", "--dtype=float32", f"--format={format}"]
    export.main(flags.parse(export.ExportConfig, ["export", *given]))
    return directory


def same_scores(run: pathlib.Path, model) -> None:
    """A torch model of two labels gives the run's step scores at every token."""
    torch = pytest.importorskip("torch")
    loaded = loaded_prm.load_for_inference(run, "float32")
    tokens = np.random.default_rng(1).integers(0, 256, (1, 40))
    z = apply(loaded.config, loaded.params, tokens, np.arange(40)[None], np.full((1, 40), 40))
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)).logits.softmax(-1)[..., 1]
    assert theirs.std() > 0.003
    np.testing.assert_allclose(theirs, jax.nn.sigmoid(z), atol=1e-5)


def in_transformers(directory: pathlib.Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForTokenClassification.from_pretrained(
        directory, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("tiny", ["llama"], indirect=True)
def test_all_weights(tiny, tmp_path):
    run = trained(tiny, "whole")
    out = exported(run, tmp_path / "out", "token_classification")
    expected = cfprm_jax.load(run, "float32").score(QUESTION, STEPS)
    np.testing.assert_allclose(cfprm_jax.load(out, "float32").score(QUESTION, STEPS), expected, atol=1e-6)
    same_scores(run, in_transformers(out))
    for format, reason in (
        ("process_reward_model", "model_type 'qwen2'"),
        ("reward_model", "model_type 'qwen2'"),
        ("peft_adapter", "train --lora_rank"),
    ):
        with pytest.raises(UserError, match=reason):
            exported(run, tmp_path / "refused", format)


def test_adapters_above_frozen_layers(tiny, tmp_path):
    run = trained(tiny, "adapted", lora_rank=2, lora_alpha=8, frozen_layers=1)
    same_scores(run, in_transformers(exported(run, tmp_path / "merged", "token_classification")))
    library = pytest.importorskip("peft")
    out = exported(run, tmp_path / "adapters", "peft_adapter")
    assert json.loads((out / "adapter_config.json").read_text())["layers_to_transform"] == [1]
    same_scores(run, library.AutoPeftModelForTokenClassification.from_pretrained(out))
