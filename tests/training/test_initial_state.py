"""The state before the first step: from files on the way of accelerators, from a seed; the same bits, and no copies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.huggingface import to_devices
from cfprm_jax.models import parameters
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import walk
from cfprm_jax.sharding import rules
from cfprm_jax.training import initial_state, program

NET = PRMConfig(BackboneConfig(64, 16, 32, 3, 4, 2, 4), dtype="bfloat16")


def build(optimizer: str, mesh: str = "data=1", devices: int = 1) -> program.Program:
    place = rules.make_mesh(DeviceConfig(mesh=mesh), jax.devices()[:devices])
    return program.build(NET, LossConfig(), OptimizerConfig(optimizer=optimizer), 10, place)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A backbone in float32, whose lower halves are not zero, without a head."""
    path = tmp_path_factory.mktemp("model")
    tensors = {}
    for name, leaf in walk(parameters.init_params(NET, jax.random.key(7))):
        spec = parameters.lookup(parameters.param_specs(NET), name)
        if not name.startswith("head"):
            layers = list(np.asarray(leaf)) if spec.stacked else [np.asarray(leaf)]
            tensors |= dict(zip(spec.hf_names(), layers, strict=True))
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize(
    ("optimizer", "mesh", "devices", "on_host"),
    [
        ("adamw_compact", "fsdp=2,tensor=2", 4, False),
        ("adamw_compact", "data=1", 1, True),
        ("adamw", "data=1", 1, False),
    ],
)
def test_loaded_as_the_optimizer_holds_it(optimizer, mesh, devices, on_host, directory, monkeypatch) -> None:
    """Layer by layer and sharded, the bits of the optimizer's own init of float32 masters."""
    monkeypatch.setattr(to_devices, "_on_host", lambda _: on_host)
    built = build(optimizer, mesh, devices)
    state, source = initial_state.create(built, directory, "pretrained", 3)
    assert "a fresh head" in source
    head = parameters.init_params(NET, jax.random.key(3))["head"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state.params["head"], head)
    masters = {**parameters.init_params(NET, jax.random.key(7)), "head": state.params["head"]}
    jax.tree.map(np.testing.assert_array_equal, state, built.init_state(masters))
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(built.abstract_state()), strict=True):
        assert (leaf.shape, leaf.dtype) == (abstract.shape, abstract.dtype)
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)


def test_random_is_that_of_the_seed() -> None:
    built = build("adamw_compact", "fsdp=2", 2)
    state, source = initial_state.create(built, None, "random", 3)
    assert source == "random, seed 3"
    masters = jax.jit(functools.partial(parameters.init_params, NET))(jax.random.key(3))
    # Another program may compute the normal distribution's inverse with another last bit.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, built.tx.masters(state.params, state.opt_state), masters)
    assert state.step == 0 and state.step.dtype == jnp.int32


def test_no_more_than_two_layers_of_masters_beside_the_state(directory, monkeypatch) -> None:
    """What is alive whenever a layer has been put in its place."""
    monkeypatch.setattr(to_devices, "_on_host", lambda _: False)
    built = build("adamw_compact")
    most, original = 0, to_devices._at_once

    def counting(*arguments, **options):
        nonlocal most
        array = original(*arguments, **options)
        most = max(most, sum(x.nbytes for x in jax.live_arrays()) - before)
        return array

    monkeypatch.setattr(to_devices, "_at_once", counting)
    before = sum(x.nbytes for x in jax.live_arrays())
    state, _ = initial_state.create(built, directory, "pretrained", 0)
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert most <= held + 2 * 4 * 16 * 32  # two layers of an MLP's matrix
