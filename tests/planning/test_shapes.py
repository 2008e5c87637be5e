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
    ],
)
def test_known(name: str, millions: int) -> None:
    known = known_backbone(name)
    assert known is not None
    assert round(count(PRMConfig(known)) / 1e6) == millions


@pytest.mark.parametrize("name", ["synthetic", "Qwen3-9B", "Qwen2.5-9B", "my-Qwen2.5-7B", "Llama-2-7B"])
def test_unknown(name: str) -> None:
    assert known_backbone(name) is None


def test_as_published(shared) -> None:
    """Every field that memory and arithmetic depend on."""
    for path in sorted((shared / "data/configs").glob("Qwen2.5-*.json")):
        published = BackboneConfig.from_hf(json.loads(path.read_text()))
        known = known_backbone(path.stem)
        assert known is not None, path.stem
        other = {"rms_norm_eps": 1.0, "max_position_embeddings": 1, "initializer_range": 1.0}
        assert dataclasses.replace(known, **other) == dataclasses.replace(published, **other), path.stem
        assert known.max_position_embeddings <= published.max_position_embeddings
