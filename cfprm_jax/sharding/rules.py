"""Sharding rules: the device mesh, and one table from the model's logical axes to mesh axes.

Each dimension of a parameter has a logical axis ("embed", "heads", ...); the model has no reference to the mesh. The
table maps logical axes to mesh axes, which implements fully sharded data parallelism (fsdp) and tensor parallelism:
XLA's partitioner derives the collectives. Batches are split by rows over data and fsdp together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import attention
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.models.parameters import ParamSpec
from cfprm_jax.models.placement import Axes, Placement
from cfprm_jax.sharding import split_embedding

MESH_AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")

RULES: dict[str, str | None] = {
    "layers": None,  # scanned over, so every device needs each layer in turn
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}
"""Mesh axis of each logical axis of a parameter; None is replicated."""

ACTIVATION_RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "length": None,
    "embed": None,  # fsdp splits the weights of the residual stream, not the stream
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}
"""Mesh axis of each logical axis of an activation."""


def parse_mesh(text: str, num_devices: int) -> dict[str, int]:
    """ "data=-1,fsdp=2" over 8 devices -> {"data": 4, "fsdp": 2, "tensor": 1}.

    Raises:
      UserError: what is not axis=number, an unknown or repeated axis, more than one -1, or a product that is not the
        number of devices.
    """
    text = " ".join(text.split())  # an error is one line
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = part.partition("=")
        if name not in MESH_AXES:
            raise UserError(f"--mesh={text:.200}: unknown axis {name!r:.80}; the axes are {', '.join(MESH_AXES)}")
        if name in sizes:
            raise UserError(f"--mesh={text:.200}: axis {name} is named twice")
        plain = number.isascii() and number.removeprefix("-").isdigit() and len(number) <= 9
        if not plain or (int(number) < 1 and int(number) != -1):
            raise UserError(
                f"--mesh={text:.200}: {part!r:.80} is not {name}=NUMBER with a number of devices, or -1 for the rest"
            )
        sizes[name] = int(number)
    sizes = {name: sizes.get(name, 1) for name in MESH_AXES}
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise UserError(f"--mesh={text:.200}: only one axis can be -1, not {' and '.join(rest)}")
    known = math.prod(size for size in sizes.values() if size != -1)
    if rest and num_devices % known == 0:
        sizes[rest[0]] = num_devices // known
    if math.prod(sizes.values()) != num_devices:
        needed = f"a multiple of {known}" if rest else str(known)
        raise UserError(f"--mesh={text:.200}: needs {needed} devices, and there are {num_devices}")
    return sizes


def make_mesh(device: DeviceConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of axes data, fsdp, tensor over these devices, by --mesh."""
    sizes = parse_mesh(device.mesh, len(devices))
    # Auto: the partitioner places what the step computes. JAX's default, Explicit, needs a type for every product.
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=tuple(devices)
    )


def row_multiple(mesh: Mesh) -> int:
    """Devices (or groups of tensor-parallel devices) that the rows of a batch are split over."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def partition_spec(name: str, spec: ParamSpec, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """The partition spec of one parameter.

    Raises:
      UserError: a dimension that its mesh axis does not divide; the message names parameter, dimension and flag.
      ValueError: a logical axis without a rule, or two dimensions on one mesh axis (a fault of the model or the table).
    """
    if len(spec.axes) != len(spec.shape):
        raise ValueError(f"{name}: {len(spec.axes)} axes {spec.axes} for the shape {spec.shape}")
    unknown = [axis for axis in spec.axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"{name}: logical axis {unknown[0]!r} has no rule; known: {', '.join(RULES)}")
    split = [RULES[axis] if axis is not None else None for axis in spec.axes]
    used = [axis for axis in split if axis is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"{name}: axes {spec.axes} put two dimensions on one mesh axis: {split}")
    for dimension, (size, mesh_axis) in enumerate(zip(spec.shape, split, strict=True)):
        if mesh_axis is not None and size % mesh_shape[mesh_axis]:
            raise UserError(
                f"--mesh: {mesh_axis}={mesh_shape[mesh_axis]} does not divide dimension {dimension} "
                f"({spec.axes[dimension]}) of {name}, which is {size} long; choose a {mesh_axis} that divides it"
            )
    return PartitionSpec(*split)


def param_shardings(mesh: Mesh, specs: Any) -> Any:
    """The sharding of every parameter: a nested dict like that of the specs. Errors as in :func:`partition_spec`."""

    def walk(path: tuple[str, ...], node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: walk((*path, key), child) for key, child in node.items()}
        return NamedSharding(mesh, partition_spec(".".join(path), node, mesh.shape))

    return walk((), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    """Replicated over all devices."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class MeshPlacement(Placement):
    """Pins activations to the devices of their rows, so that weights are gathered and not activations."""

    mesh: Mesh

    def __call__(self, activation: jax.Array, axes: Axes) -> jax.Array:
        return jax.lax.with_sharding_constraint(activation, NamedSharding(self.mesh, _activation_spec(axes)))

    def per_device(self, function: Callable[..., Any], inputs: tuple[Axes, ...], output: Axes) -> Callable[..., Any]:
        if self.mesh.size == 1:
            return function
        # Kernels do not declare how their results vary over the mesh, which check_vma requires.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(_activation_spec(axes) for axes in inputs),
            out_specs=_activation_spec(output),
            check_vma=False,
        )

    def embed(self, table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
        if self.mesh.shape["fsdp"] * self.mesh.shape["tensor"] == 1 or len(tokens) % row_multiple(self.mesh):
            return super().embed(table, tokens, dtype)
        return split_embedding.take(table, tokens, dtype, self.mesh)


def _activation_spec(axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(None if axis is None else ACTIVATION_RULES[axis] for axis in axes))


def constrain_activations(mesh: Mesh) -> Placement:
    """The placement of activations on a mesh."""
    return MeshPlacement(mesh)


def attention_backend(backend: str, mesh: Mesh, backbone: BackboneConfig, dtype: str) -> str:
    """Resolve --attention for the devices of a mesh, which need not be this machine's.

    Raises:
      UserError: a backend that cannot compute this network there.
    """
    return attention.resolve(
        backend,
        mesh.devices.flat[0].platform,
        dtype,
        heads=backbone.num_attention_heads,
        kv_heads=backbone.num_key_value_heads,
        head_dim=backbone.head_dim,
        head_parts=mesh.shape["tensor"],
    )


def batch_shardings(mesh: Mesh) -> PackedBatch:
    """Rows are split; the small step positions and labels are replicated, as a trajectory may be in any row."""
    rows, everywhere = NamedSharding(mesh, PartitionSpec(ROW_AXES)), replicated(mesh)
    return PackedBatch(rows, rows, rows, *(everywhere,) * 4, hidden=rows)  # type: ignore[arg-type]


def put_batch(batch: PackedBatch, shardings: PackedBatch) -> PackedBatch:
    """A host batch, the same on every process, onto the devices; each process sends its own devices' part."""

    def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put, batch, jax.tree.broadcast(shardings, batch))
