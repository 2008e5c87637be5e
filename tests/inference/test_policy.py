"""Language models from directories: which head, which ends of a turn, and what is refused."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cfprm_jax.config import DeviceConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference.policy import open_policy
from cfprm_jax.sharding import rules


@pytest.fixture(scope="module")
def tied(make_language_model):
    return make_language_model(True)[0]


@pytest.fixture(scope="module")
def untied(make_language_model):
    return make_language_model(False)[0]


@pytest.fixture
def copied(tied, untied, tmp_path):
    """A copy of a directory that may be damaged."""

    def copy(is_tied):
        return shutil.copytree(tied if is_tied else untied, tmp_path / "copy")

    return copy


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_head_is_the_embedding_or_its_own(tied, untied, one_device):
    policy = open_policy(tied, "float32", one_device)
    assert policy.params.lm_head is policy.params.embedding
    policy = open_policy(untied, "float32", one_device)
    stored = load_file(untied / "model.safetensors")
    np.testing.assert_array_equal(policy.params.lm_head, stored["lm_head.weight"])
    np.testing.assert_array_equal(
        policy.params.layers[1]["mlp"]["up"]["kernel"], stored["model.layers.1.mlp.up_proj.weight"]
    )
    assert len(policy.params.layers) == policy.config.backbone.num_hidden_layers


def test_over_devices_every_parameter_is_split_as_in_training(tied):
    mesh = rules.make_mesh(DeviceConfig(mesh="data=1,fsdp=2,tensor=1"), jax.devices()[:2])
    policy = open_policy(tied, "bfloat16", mesh)
    kernel = policy.params.layers[0]["mlp"]["up"]["kernel"]
    assert kernel.dtype == jnp.bfloat16 and kernel.sharding.spec == jax.P("tensor", "fsdp")


def test_ends_of_a_turn(copied, one_device):
    directory = copied(True)
    own = open_policy(directory, "float32", one_device).tokenizer.eos_token_id
    for config, generation, expected in (
        (5, None, {5, own}),
        ([5, 6], {}, {5, 6, own}),
        (5, {"eos_token_id": 7}, {7, own}),
        (None, {"eos_token_id": [8, 9]}, {8, 9, own}),
    ):
        rewrite(directory / "config.json", eos_token_id=config)
        path = directory / "generation_config.json"
        path.unlink(missing_ok=True)
        if generation is not None:
            path.write_text(json.dumps(generation))
        assert set(open_policy(directory, "float32", one_device).stops) == expected
    path.write_text(json.dumps({"eos_token_id": ["x"]}))
    with pytest.raises(UserError, match=r"eos_token_id\[0\]: expected a whole number"):
        open_policy(directory, "float32", one_device)
    path.write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        open_policy(directory, "float32", one_device)


def test_a_head_that_is_missing_or_of_another_shape(copied, one_device):
    directory = copied(False)
    tensors = load_file(directory / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"no lm_head\.weight"):
        open_policy(directory, "float32", one_device)
    save_file({**tensors, "lm_head.weight": head[:-1]}, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight has shape"):
        open_policy(directory, "float32", one_device)


def test_what_is_no_language_model(copied, one_device, tmp_path):
    with pytest.raises(UserError, match="not a directory"):
        open_policy(tmp_path / "nowhere", "float32", one_device)
    directory = copied(True)
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "score.weight": np.zeros((1, 64), np.float32)}, directory / "model.safetensors")
    with pytest.raises(UserError, match="process reward model"):
        open_policy(directory, "float32", one_device)
