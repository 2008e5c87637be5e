"""Exports of every family: transformers' own class loads them and gives the same scores, and they come back here."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.prm import apply
from cfprm_jax.models.rope_scaling import Llama3Scaling

ENCODING = EncodingConfig(max_length=64)
SWITCHES = {
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 16)},
    "Mistral": {"sliding_window": 32},
}


def config_of(classes: str) -> PRMConfig:
    shape = {"head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128}
    sizes = {**shape, **SWITCHES[classes]}
    return PRMConfig(BackboneConfig(300, 32, 48, 2, 4, 2, model_type=classes.lower(), **sizes))


@pytest.mark.parametrize("classes", SWITCHES)
def test_transformers_loads_it_and_scores_the_same(classes, random_params, make_rows, tiny_tokenizer, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of(classes)
    params = random_params(config)
    loading.export(tmp_path / "model", params, config, tiny_tokenizer, ENCODING, dtype="float32")
    model, info = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float32
    )
    assert type(model).__name__ == f"{classes}ForTokenClassification"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = make_rows(np.random.default_rng(0).integers(0, 258, (2, 30)))
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(rows.tokens.astype(np.int64))).logits.softmax(-1)[..., 1].numpy()
    ours = np.asarray(jax.nn.sigmoid(jax.jit(apply, static_argnums=0)(config, params, *rows)))
    assert ours.std() > 0.03
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    read, _ = loading.read_config(tmp_path / "model")
    assert read == config.backbone
    again, _ = loading.load_params(tmp_path / "model", PRMConfig(read))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_window_without_effect_is_not_exported(random_params, tiny_tokenizer, tmp_path):
    """Readers other than transformers would apply it."""
    backbone = config_of("Llama").backbone
    raw = {**backbone.to_hf(), "sliding_window": 8, "use_sliding_window": True}
    config = PRMConfig(BackboneConfig.from_hf(raw))
    assert config.backbone.sliding_window is None and config.backbone.longest == (128, "max_position_embeddings")
    loading.export(tmp_path / "model", random_params(config), config, tiny_tokenizer, ENCODING, dtype="float32")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["sliding_window"] is None and written["use_sliding_window"] is False
    assert loading.read_config(tmp_path / "model")[0] == backbone


def test_classes_of_qwen2_are_refused_for_others(random_params, tiny_tokenizer, tmp_path):
    config = config_of("Llama")
    for head, instead in (("linear", "name token_classification"), ("mlp", "no other format holds it")):
        other = dataclasses.replace(config, head=head)
        with pytest.raises(UserError, match=f"--format=reward_model .* model_type 'qwen2', .* 'llama': {instead}"):
            loading.export(tmp_path / "out", {}, other, tiny_tokenizer, ENCODING, format="reward_model")
    assert not (tmp_path / "out").exists()


def test_a_missing_norm_of_queries_is_named(random_params, tiny_tokenizer, tmp_path):
    config = config_of("Qwen3")
    loading.export(tmp_path / "model", random_params(config), config, tiny_tokenizer, ENCODING)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**raw, "model_type": "llama"}))
    backbone, _ = loading.read_config(tmp_path / "model")
    with pytest.raises(UserError, match=r"model.layers.\[0-1\].self_attn.q_norm.weight: unknown"):
        loading.load_params(tmp_path / "model", PRMConfig(backbone))
