"""A small random PRM over the synthetic world's tokenizer."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from cfprm_jax import synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.models import hf
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.training.checkpoint import LoadedPRM

WORLD = synthetic.WorldConfig(train_problems=4, held_out_problems=3, solutions_per_problem=4, candidates_per_problem=16)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """The files of a small world."""
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)


@pytest.fixture(scope="session")
def loaded(world):
    """A PRM with random weights, two layers, float32, for up to 96 tokens."""
    backbone, _ = hf.read_config(world.model)
    config = PRMConfig(dataclasses.replace(backbone, num_hidden_layers=2, initializer_range=0.3))
    encoding = EncodingConfig(max_length=96, system_prompt="")
    return LoadedPRM(
        config, init_params(config, jax.random.key(0)), load_tokenizer(world.model), encoding, {"head": "linear"}
    )
