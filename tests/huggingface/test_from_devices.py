"""Pieces of parameters on the host: every sharding, type and way of cutting gives the same rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.huggingface import from_devices

SPECS = [(), (None, "x"), (None, None, "y"), (None, "y", "x"), ("x",), (None, ("x", "y"))]


def sharded(values, spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("on_host", [True, False])
def test_pieces_are_the_rows(spec, dtype, on_host, monkeypatch):
    monkeypatch.setattr(from_devices, "PIECE_BYTES", 300)
    monkeypatch.setattr(from_devices, "_on_host", lambda _: on_host)
    values = np.random.default_rng(0).standard_normal((4, 16, 8)).astype(np.float32)
    leaf = sharded(values, spec)
    for layer in range(4):
        found = list(from_devices.pieces(leaf, dtype, layer))
        assert max(piece.nbytes for piece in found) <= 300 and len(found) > 1
        np.testing.assert_array_equal(np.concatenate(found), values[layer].astype(dtype))
    np.testing.assert_array_equal(from_devices.whole(leaf, dtype), values.astype(dtype))


def test_a_vector_and_a_single_row_larger_than_a_piece(monkeypatch):
    monkeypatch.setattr(from_devices, "PIECE_BYTES", 16)
    for values in (np.arange(24, dtype=np.float32), np.arange(48, dtype=np.float32).reshape(2, 24)):
        found = list(from_devices.pieces(jnp.asarray(values), np.dtype(np.float32)))
        np.testing.assert_array_equal(np.concatenate(found), values)
    assert [len(piece) for piece in found] == [1, 1]


def test_on_the_host_nothing_is_copied_that_need_not_be():
    leaf = jnp.ones((3, 64, 8))
    (piece,) = from_devices.pieces(leaf, np.dtype(np.float32), 1)
    assert np.shares_memory(piece, np.asarray(leaf))


def test_on_a_device_only_a_layer_in_the_stored_type_leaves_it(monkeypatch):
    monkeypatch.setattr(from_devices, "_on_host", lambda _: False)
    fetched, original = [], np.asarray

    def recording(value, *rest, **named):
        if isinstance(value, jax.Array):
            fetched.append((value.shape, value.dtype))
        return original(value, *rest, **named)

    monkeypatch.setattr(from_devices.np, "asarray", recording)
    (piece,) = from_devices.pieces(jnp.ones((3, 64, 8)), np.dtype(ml_dtypes.bfloat16), 1)
    assert piece.shape == (64, 8)
    assert fetched == [((1, 64, 8), jnp.bfloat16)]
