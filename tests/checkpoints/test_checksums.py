"""Checksums: equal on every mesh, different after one flipped bit of any type, and after values change places."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.checkpoints import checksums
from cfprm_jax.checkpoints.orbax_files import DamagedError

TYPES = ("float32", "bfloat16", "int32", "int16", "uint8", "int8", "bool")
WHERE = pathlib.Path("run/checkpoints/3")


def on(array: np.ndarray, devices: int) -> jax.Array:
    return jax.device_put(array, NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("all",)), PartitionSpec("all")))


def mix(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finaliser in NumPy."""
    x = x.astype(np.uint64)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) % np.uint64(2**32)
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) % np.uint64(2**32)
    return x ^ (x >> np.uint64(16))


def expected(array: np.ndarray) -> int:
    place = np.zeros(array.shape, np.uint64)
    for axis, index in enumerate(np.indices(array.shape)):
        place += mix((index + 0x9E3779B9 * (axis + 1)) % 2**32)
    bits = array.view(f"u{array.itemsize}").astype(np.uint64)
    return int(mix(bits ^ place % 2**32).sum() % 2**32)


def stored(state, **changed) -> dict:
    return {**checksums.recorded(state), **changed}


def differs(before, after) -> bool:
    try:
        checksums.verify(WHERE, after, stored(before))
    except DamagedError as error:
        assert "changed on disk: a" in str(error)
        return True
    return False


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_on_every_mesh_and_exact(dtype: str) -> None:
    array = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(16, 5, 3)) * 50).astype(dtype))
    found = [checksums.of_state({"a": {"b": on(array, n)}}) for n in (1, 4, 8)]
    assert found == [{"a/b": expected(array)}] * 3


def test_other_ranks() -> None:
    for array in (np.float32(3), np.zeros((0, 3), np.float32), np.arange(7, dtype=np.int32)):
        assert checksums.of_state({"a": jnp.asarray(array)}) == {"a": expected(np.asarray(array))}


@pytest.mark.parametrize("dtype", TYPES[:-1])
def test_one_bit_is_seen(dtype: str) -> None:
    array = np.asarray(jnp.arange(40).astype(dtype))
    for bit in (0, 3, 8 * array.itemsize - 1):
        raw = array.copy()
        raw.view(f"u{array.itemsize}")[17] ^= np.array(1 << bit, f"u{array.itemsize}")
        step = jnp.int32(3)
        assert differs({"a": jnp.asarray(array), "step": step}, {"a": jnp.asarray(raw), "step": step})


@given(st.permutations(range(12)))
def test_values_that_change_places_are_seen(order) -> None:
    array = np.arange(12, dtype=np.float32)
    moved = jnp.asarray(array[list(order)].reshape(3, 4))
    assert differs({"a": jnp.asarray(array.reshape(3, 4))}, {"a": moved}) == (list(order) != list(range(12)))


def test_rows_and_layers_that_change_places_are_seen() -> None:
    array = np.random.default_rng(0).normal(size=(4, 6, 6)).astype(np.float32)
    for moved in (array[::-1], array[:, ::-1], array[:, :, ::-1], array.swapaxes(1, 2), np.roll(array, 1)):
        assert differs({"a": jnp.asarray(array)}, {"a": jnp.asarray(moved)})


def test_what_has_no_checksum_differs() -> None:
    state = {"a": jnp.ones(3), "b": jnp.ones(3)}
    with pytest.raises(DamagedError, match=r"meta/metadata has no checksum of some of: a"):
        checksums.verify(WHERE, state, stored({"b": jnp.ones(3)}))
    with pytest.raises(DamagedError, match="has no checksum"):
        checksums.verify(WHERE, state, {})
    assert checksums.of_state({"a": np.zeros(3)}) == {}


def test_a_part_of_the_state_is_compared_with_its_part() -> None:
    state = {"params": {"a": jnp.ones(3)}, "step": jnp.int32(1)}
    checksums.verify(WHERE, {"params": state["params"]}, stored(state))


def test_checkpoints_of_earlier_versions_are_read() -> None:
    """Their checksum is the sum of the bits, which detects a changed bit but not another order; a note is logged."""
    array = np.arange(4, dtype=np.float32)
    meta = {"checksums": {"a": int(array.view(np.uint32).astype(np.uint64).sum() % 2**32)}}
    for same in (array, array[::-1]):
        checksums.verify(WHERE, {"a": jnp.asarray(same)}, meta)
    with pytest.raises(DamagedError, match="changed on disk: a"):
        checksums.verify(WHERE, {"a": jnp.asarray(array + 1)}, meta)
    assert checksums.note(WHERE, meta) and not checksums.note(WHERE, stored({}))
    with pytest.raises(DamagedError, match="checksums of another version"):
        checksums.verify(WHERE, {"a": jnp.asarray(array)}, {**meta, "checksum_method": "later"})
