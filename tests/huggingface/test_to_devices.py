"""Stored tensors on devices: the way of accelerators, layer by layer, gives what the way of the CPU gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from cfprm_jax.huggingface import safetensors_files, to_devices
from cfprm_jax.models.parameters import ParamSpec

STACKED = ParamSpec((5, 16, 8), ("layers", "mlp", "embed"), "matrix", jax.nn.initializers.zeros, "layers.{layer}.x")


def stored(directory, dtype):
    generator = np.random.default_rng(0)
    values = {name: generator.standard_normal((16, 8)).astype(dtype) for name in STACKED.hf_names()}
    safetensors.numpy.save_file(values, directory / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in safetensors_files.read_header(directory / "model.safetensors")}
    return np.stack(list(values.values())), [tensors[name] for name in values]


def sharding_of(spec):
    if spec is None:
        return None
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize("spec", [None, (), (None, "x"), (None, None, "y"), (None, "y", "x")])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)])
@pytest.mark.parametrize("on_host", [True, False])
def test_values_and_sharding(spec, dtype, on_host, tmp_path, monkeypatch):
    monkeypatch.setattr(to_devices, "_on_host", lambda _: on_host)
    monkeypatch.setattr(to_devices, "_JOB_BYTES", 100)
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 70)
    values, tensors = stored(tmp_path, ml_dtypes.bfloat16)
    leaf = to_devices.load_param(STACKED, tensors, dtype, sharding_of(spec))
    np.testing.assert_array_equal(leaf, values.astype(dtype))
    assert leaf.dtype == dtype
    if spec is None:
        assert not leaf.committed
    else:
        assert leaf.sharding.is_equivalent_to(sharding_of(spec), 3)


@pytest.mark.parametrize("sharding", ["layers", "one device"])
def test_what_cannot_go_layer_by_layer_goes_at_once(sharding, tmp_path, monkeypatch):
    monkeypatch.setattr(to_devices, "_on_host", lambda _: False)
    monkeypatch.setattr(to_devices, "_layer_by_layer", lambda *_: pytest.fail("layer by layer"))
    values, tensors = stored(tmp_path, np.float32)
    where = SingleDeviceSharding(jax.devices()[1])
    if sharding == "layers":
        where = NamedSharding(Mesh(np.array(jax.devices()[:5]), ("x",)), PartitionSpec("x"))
    leaf = to_devices.load_param(STACKED, tensors, np.dtype(np.float32), where)
    assert leaf.sharding == where
    np.testing.assert_array_equal(leaf, values)


def test_layer_by_layer_the_host_holds_two_layers(tmp_path, monkeypatch):
    """Buffers are made for a layer at a time, and a layer's is not begun before the last but one is on the device."""
    monkeypatch.setattr(to_devices, "_on_host", lambda _: False)
    sizes, original = [], to_devices._aligned_empty

    def recording(shape, dtype):
        sizes.append(shape)
        return original(shape, dtype)

    monkeypatch.setattr(to_devices, "_aligned_empty", recording)
    _, tensors = stored(tmp_path, np.float32)
    to_devices.load_param(STACKED, tensors, np.dtype(np.float32), None)
    assert sizes == [(16, 8)] * 5


def test_whole_rows_in_the_stored_type_go_straight_to_their_place(tmp_path, monkeypatch):
    values, tensors = stored(tmp_path, np.float32)
    monkeypatch.setattr(safetensors_files.StoredTensor, "chunks", lambda *_: pytest.fail("through a buffer"))
    leaf = to_devices.load_param(STACKED, tensors, np.dtype(np.float32), None)
    np.testing.assert_array_equal(leaf, values)


def test_a_small_array_on_the_host(tmp_path):
    value = np.arange(8, dtype=np.float32).reshape(1, 8)
    for where in (None, sharding_of((None, "y"))):
        np.testing.assert_array_equal(to_devices.place(value, where), jnp.asarray(value))
