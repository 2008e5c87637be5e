"""Checksums: equal on every mesh, different after one flipped bit of any type."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.checkpoints import checksums

TYPES = ("float32", "bfloat16", "int32", "int16", "uint8", "int8", "bool")


def on(array: np.ndarray, devices: int) -> jax.Array:
    return jax.device_put(array, NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("all",)), PartitionSpec("all")))


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_on_every_mesh_and_exact(dtype: str) -> None:
    array = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(16, 5)) * 50).astype(dtype))
    expected = int(array.view(f"u{array.itemsize}").astype(np.uint64).sum() % 2**32)
    assert [checksums.of_state({"a": {"b": on(array, n)}}) for n in (1, 4, 8)] == [{"a/b": expected}] * 3


@pytest.mark.parametrize("dtype", TYPES[:-1])
def test_one_bit_is_seen(dtype: str) -> None:
    array = np.asarray(jnp.arange(40).astype(dtype))
    before = checksums.of_state({"a": jnp.asarray(array), "step": jnp.int32(3)})
    for bit in (0, 3, 8 * array.itemsize - 1):
        raw = array.copy()
        raw.view(f"u{array.itemsize}")[17] ^= np.array(1 << bit, f"u{array.itemsize}")
        after = checksums.of_state({"a": jnp.asarray(raw), "step": jnp.int32(3)})
        assert checksums.differences(before, after) == ["a"]


def test_what_has_no_checksum_differs() -> None:
    assert checksums.differences({"b": 2}, {"a": 1, "b": 2}) == ["a"]
    assert checksums.of_state({"a": np.zeros(3)}) == {}
