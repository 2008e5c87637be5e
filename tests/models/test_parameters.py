"""Fresh parameters: values by path and key, statistics, types, shardings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import abstract_tree, init_params, lookup, map_specs, param_specs, walk

CONFIG = PRMConfig(BackboneConfig(97, 64, 96, 3, 4, 2, 16, initializer_range=0.05))


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_abstract_and_fresh_agree(head, dtype):
    config = dataclasses.replace(CONFIG, head=head)
    fresh = init_params(config, jax.random.key(0), dtype)
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert described(fresh) == described(abstract_tree(param_specs(config), dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(fresh["head"])} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(fresh["backbone"])} == {jnp.dtype(dtype)}


def test_statistics():
    params = init_params(CONFIG, jax.random.key(1))
    for path, spec in walk(param_specs(CONFIG)):
        values = np.asarray(lookup(params, path))
        if spec.kind in ("matrix", "embedding"):
            assert abs(values.std() - 0.05) < 0.05 * 4 / np.sqrt(2 * values.size), path
        else:
            assert (values == (1 if spec.kind == "norm" else 0)).all(), path


def test_values_depend_on_key_and_path_alone():
    one, same, other = (init_params(CONFIG, jax.random.key(seed)) for seed in (0, 0, 1))
    mlp = init_params(dataclasses.replace(CONFIG, head="mlp"), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    jax.tree.map(np.testing.assert_array_equal, one["backbone"], mlp["backbone"])
    gate, up = (one["backbone"]["layers"]["mlp"][name]["kernel"] for name in ("gate", "up"))
    assert (gate != up).mean() > 0.99
    assert (gate != other["backbone"]["layers"]["mlp"]["gate"]["kernel"]).mean() > 0.99


def test_init_under_jit_is_born_sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",))

    def shard(path, spec):
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if axis == "embed" else None for axis in spec.axes)))

    shardings = map_specs(shard, CONFIG)
    init = jax.jit(functools.partial(init_params, CONFIG), out_shardings=shardings)
    sharded = init(jax.random.key(0))
    kernel = sharded["backbone"]["layers"]["attention"]["query"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (3, 64, 16)
    unsharded = init_params(CONFIG, jax.random.key(0))
    # Compiled and not, the last bit of the normal distribution's inverse may differ.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), sharded, unsharded)
    assert (
        abstract_tree(param_specs(CONFIG), shardings=shardings)["backbone"]["embedding"].sharding
        == shardings["backbone"]["embedding"]
    )
