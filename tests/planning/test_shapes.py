"""The shapes of published backbones, against their own config.json files."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import count
from cfprm_jax.planning.shapes import known_backbone


@pytest.mark.parametrize(
    ("name", "millions"),  # without a language-model head that is not the embedding
    [
        ("models/Qwen2.5-Math-7B", 7_071),
        ("Qwen2.5-7B-Instruct", 7_071),
        ("Qwen2.5-72B", 71_461),
        ("Qwen2.5-Math-PRM-7B", 7_071),
        ("Qwen3-0.6B", 596),
        ("Qwen3-8B-Base", 7_568),
        ("Meta-Llama-3.1-8B", 7_505),
        ("Llama-3.2-1B-Instruct", 1_236),
        ("Mistral-7B-v0.1", 7_111),
        ("Mistral-7B-v0.3", 7_114),
    ],
)
def test_known(name: str, millions: int) -> None:
    known = known_backbone(name)
    assert known is not None
    assert round(count(PRMConfig(known)) / 1e6) == millions


@pytest.mark.parametrize("name", ["synthetic", "Qwen3-9B", "Qwen2.5-9B", "my-Qwen2.5-7B", "Llama-2-7B"])
def test_unknown(name: str) -> None:
    assert known_backbone(name) is None


WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
PUBLISHED = {
    "Qwen3-8B": {
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral",
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_families_are_those_of_their_config_files(name: str) -> None:
    assert known_backbone(name) == BackboneConfig.from_hf({**WIDE, **PUBLISHED[name]})


def test_as_published(shared) -> None:
    """Every field that memory and arithmetic depend on."""
    for path in sorted((shared / "data/configs").glob("Qwen2.5-*.json")):
        published = BackboneConfig.from_hf(json.loads(path.read_text()))
        known = known_backbone(path.stem)
        assert known is not None, path.stem
        other = {"rms_norm_eps": 1.0, "max_position_embeddings": 1, "initializer_range": 1.0}
        assert dataclasses.replace(known, **other) == dataclasses.replace(published, **other), path.stem
        assert known.max_position_embeddings <= published.max_position_embeddings
