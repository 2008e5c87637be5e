"""A process reward model with random weights, exported as a Hugging Face directory."""

from __future__ import annotations

import pathlib

import jax

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params


def export_random(model: str | pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Export a PRM of the shape of a model, in float32, with solutions of at most 96 tokens; the directory."""
    config = PRMConfig(loading.read_config(model)[0])
    encoding = EncodingConfig(max_length=96, system_prompt="")
    params = init_params(config, jax.random.key(0))
    loading.export(directory, params, config, load_tokenizer(model), encoding, dtype="float32")
    return directory
