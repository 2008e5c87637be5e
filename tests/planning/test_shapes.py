"""The shapes of published backbones, against their own config.json files."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cfprm_jax.models.config import Qwen2Config
from cfprm_jax.planning.shapes import known_backbone


@pytest.mark.parametrize(
    "name", ["models/Qwen2.5-Math-7B", "Qwen2.5-7B-Instruct", "Qwen2.5-72B", "Qwen2.5-Math-PRM-7B"]
)
def test_known(name: str) -> None:
    assert known_backbone(name) is not None


@pytest.mark.parametrize("name", ["synthetic", "Qwen3-8B", "Qwen2.5-9B", "my-Qwen2.5-7B"])
def test_unknown(name: str) -> None:
    assert known_backbone(name) is None


def test_as_published(shared) -> None:
    """Every field that memory and arithmetic depend on."""
    for path in sorted((shared / "data/configs").glob("Qwen2.5-*.json")):
        published = Qwen2Config.from_hf(json.loads(path.read_text()))
        known = known_backbone(path.stem)
        assert known is not None, path.stem
        other = {"rms_norm_eps": 1.0, "max_position_embeddings": 1, "initializer_range": 1.0}
        assert dataclasses.replace(known, **other) == dataclasses.replace(published, **other), path.stem
        assert known.max_position_embeddings <= published.max_position_embeddings
