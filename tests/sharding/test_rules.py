"""The mesh from its flag, the rules, and what is refused before anything is loaded."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from cfprm_jax.config import DeviceConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.parameters import ParamSpec, lookup, param_specs, walk
from cfprm_jax.sharding import rules


@pytest.mark.parametrize(
    ("text", "devices", "sizes"),
    [
        ("data=-1,fsdp=1,tensor=1", 8, (8, 1, 1)),
        ("data=-1,fsdp=2,tensor=2", 8, (2, 2, 2)),
        ("fsdp=-1", 4, (1, 4, 1)),
        ("tensor=2,data=1", 2, (1, 1, 2)),
        (" data=1 , fsdp=1 ", 1, (1, 1, 1)),
    ],
)
def test_mesh(text: str, devices: int, sizes: tuple[int, ...]) -> None:
    mesh = rules.make_mesh(DeviceConfig(mesh=text), jax.devices()[:devices])
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert rules.row_multiple(mesh) == sizes[0] * sizes[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=\u00b2", r"is not data=NUMBER"),
        ("data=" + "9" * 5_000, r"is not data=NUMBER"),
        ("data=3", r"--mesh=data=3: .* 3 devices, and there are 8"),
        ("data=-1,tensor=3", r"a multiple of 3 devices, and there are 8"),
        ("data=-1,fsdp=-1", r"only one axis can be -1, not data and fsdp"),
        ("data=0", r"'data=0' is not data=NUMBER"),
        ("data=-2", r"'data=-2' is not data=NUMBER"),
        ("data", r"'data' is not data=NUMBER"),
        ("data=two", r"'data=two' is not"),
        ("model=2", r"unknown axis 'model'; the axes are data, fsdp, tensor"),
        ("data=2,data=4", r"axis data is named twice"),
    ],
)
def test_bad_mesh(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules.parse_mesh(text, 8)


def spec(shape, axes) -> ParamSpec:
    return ParamSpec(shape, axes, "matrix", jax.nn.initializers.zeros, "w")


def test_partition_spec() -> None:
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert rules.partition_spec("w", spec((3, 4, 6), ("layers", "mlp", "embed")), sizes) == PartitionSpec(
        None, "tensor", "fsdp"
    )
    assert rules.partition_spec("w", spec((5, 4), (None, "embed")), sizes) == PartitionSpec(None, "fsdp")
    with pytest.raises(UserError, match=r"--mesh: tensor=2 does not divide dimension 1 \(mlp\) of w, which is 5 long"):
        rules.partition_spec("w", spec((3, 5, 6), ("layers", "mlp", "embed")), sizes)
    with pytest.raises(ValueError, match="two dimensions on one mesh axis"):
        rules.partition_spec("w", spec((4, 4), ("mlp", "heads")), sizes)
    with pytest.raises(ValueError, match="'unheard' has no rule"):
        rules.partition_spec("w", spec((4,), ("unheard",)), sizes)
    with pytest.raises(ValueError, match="2 axes"):
        rules.partition_spec("w", spec((4,), ("mlp", "embed")), sizes)


def test_a_model_that_the_mesh_does_not_divide_is_refused(setup) -> None:
    with pytest.raises(UserError, match=r"tensor=8 does not divide dimension 0 \(vocab\) of backbone.embedding"):
        mesh = rules.make_mesh(DeviceConfig(mesh="tensor=8"), jax.devices())
        rules.param_shardings(mesh, {"backbone": {"embedding": spec((12, 16), ("vocab", "embed"))}})


def test_state_is_sharded_like_its_parameters(setup) -> None:
    s = setup("data=2,fsdp=2,tensor=2", 8, network="prm")
    state = s.init()
    expected = dict(walk(s.param_shardings))
    for name, array in walk(state.params):
        slot = lookup(state.opt_state, name)
        for held in (array, slot.first, slot.second):
            assert held.sharding.is_equivalent_to(expected[name], held.ndim), name
    up = state.params["backbone"]["layers"]["mlp"]["up"]["kernel"]
    assert up.addressable_shards[0].data.size == up.size // 4
    specs = dict(walk(param_specs(s.config)))
    assert {name: array.shape for name, array in walk(state.params)} == {n: spec.shape for n, spec in specs.items()}


def test_batch_rows_are_split(setup, batch) -> None:
    s = setup("data=2,fsdp=2,tensor=2", 8)
    host = batch(rows=8)
    put = s.put(host)
    assert put.tokens.addressable_shards[0].data.shape == (2, 16)
    assert put.labels.sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, put, host)
