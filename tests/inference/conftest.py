"""A small random PRM, and a small random language model, over the synthetic world's tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from cfprm_jax import synthetic
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.decoder import DecoderParams
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.policy import Policy, unstacked
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import init_params, map_specs
from cfprm_jax.sharding import rules

WORLD = synthetic.WorldConfig(train_problems=4, held_out_problems=3, solutions_per_problem=4, candidates_per_problem=16)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The files of a small world."""
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)


@pytest.fixture(scope="session")
def loaded(world):
    """A PRM with random weights, two layers, float32, for up to 96 tokens."""
    backbone, _ = loading.read_config(world.model)
    config = PRMConfig(dataclasses.replace(backbone, num_hidden_layers=2, initializer_range=0.3))
    encoding = EncodingConfig(max_length=96, system_prompt="")
    return LoadedPRM(
        config, init_params(config, jax.random.key(0)), load_tokenizer(world.model), encoding, {"head": "linear"}
    )


@pytest.fixture(scope="session")
def make_policy() -> Callable[..., Policy]:
    """Makes a random policy in memory, whose tokenizer is none; biases and norms are random, too."""

    def make(seed: int = 0, stops: tuple[int, ...] = (1,), scale: float = 1.0, dtype: str = "float32", **sizes: Any):
        settings = {
            "vocab_size": 19,
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "rope_theta": 1e4,
            "tie_word_embeddings": True,
        }
        config = PRMConfig(BackboneConfig(**{**settings, **sizes}), dtype=dtype, attention="xla")
        generator = np.random.default_rng(seed)

        def one(path: str, spec: Any) -> jax.Array:
            noise = generator.standard_normal(spec.shape).astype(np.float32)
            value = {"norm": 1 + 0.3 * noise, "bias": 0.5 * noise, "embedding": 0.4 * scale * noise}
            return jax.numpy.asarray(value.get(spec.kind, 0.3 * noise), config.dtype)

        backbone = map_specs(one, config)["backbone"]
        layers = unstacked(backbone["layers"])
        embedding = backbone["embedding"]
        return Policy(config, DecoderParams(embedding, layers, backbone["final_norm"], embedding), None, stops)

    return make


@pytest.fixture(scope="session")
def make_language_model(tmp_path_factory) -> Callable[..., Any]:
    """Writes a random Qwen2ForCausalLM; gives its directory and the torch model. See tiny_policies."""
    pytest.importorskip("torch")
    from tiny_policies import write_language_model

    return lambda *arguments, **options: write_language_model(tmp_path_factory.mktemp("lm"), *arguments, **options)


@pytest.fixture(scope="session")
def one_device():
    return rules.make_mesh(DeviceConfig(), jax.devices()[:1])
