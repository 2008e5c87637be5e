"""A run that freezes weights: where they came from, and the whole model that scoring and export use.

Checkpoints of such a run contain what is trained and its optimizer state. The frozen weights are not copied: prm.json
of the run stores their directory and a fingerprint. Resume, scoring and export load them from there, after its files
have been compared with the fingerprint. So an export has them exactly as that directory does, whatever type the run
computed in.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.safetensors_files import fingerprint, list_directory
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.partition import Partition
from cfprm_jax.sharding import rules

LORA, FROZEN = "lora", "frozen"
"""Fields of prm.json; a run has one of them at most."""


def load(network: PRMConfig, specs: Any, directory: pathlib.Path, dtype: Any, mesh: Mesh) -> dict[str, Any]:
    """Frozen parameters from a Hugging Face directory, in their shardings.

    Args:
      specs: of the parameters; those of :attr:`~cfprm_jax.models.partition.Partition.frozen`, or some of them.

    Raises:
      UserError: the directory does not hold the network's weights.
    """
    params, _ = loading.load_params(
        directory,
        network,
        shardings=rules.param_shardings(mesh, specs),
        dtype=jnp.dtype(dtype),
        head_key=jax.random.key(0),  # only so that a directory without a head is accepted
        specs=specs,
    )
    return params


def record(partition: Partition, directory: pathlib.Path, dtype: str) -> dict[str, Any]:
    """The entry of prm.json about the partition and its frozen weights; empty if nothing is frozen."""
    layers, adapters = partition.frozen_layers, partition.lora
    if not layers and adapters is None:
        return {}
    base = {
        "backbone": str(directory.resolve()),
        "backbone_dtype": dtype,
        "backbone_sha256": fingerprint(list_directory(directory).tensors),
    }
    if adapters is None:
        return {FROZEN: {"layers": layers, **base}}
    own = {"rank": adapters.rank, "alpha": adapters.alpha, "targets": list(adapters.targets)}
    return {LORA: {**own, **({"frozen_layers": layers} if layers else {}), **base}}


def described(meta: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of prm.json; None for a run that trained everything."""
    return meta.get(LORA) or meta.get(FROZEN)


def partition_of(meta: Mapping[str, Any], network: PRMConfig) -> Partition:
    """The partition that prm.json describes."""
    if LORA in meta:
        own = meta[LORA]
        adapters = Lora(own["rank"], own["alpha"], tuple(own["targets"]))
        return Partition(network, own.get("frozen_layers", 0), adapters)
    return Partition(network, meta.get(FROZEN, {}).get("layers", 0))


def whole(meta: Mapping[str, Any], trainable: parameters.Params, network: PRMConfig, dtype: Any, mesh: Mesh) -> Any:
    """The parameters of the same model as one nested dict, with adapters merged.

    Args:
      meta: prm.json.
      trainable: of dtype, but for adapters, which are float32.

    Raises:
      UserError: the frozen weights are not where they were, or are others.
    """
    partition, found = partition_of(meta, network), described(meta)
    if found is None:
        return trainable
    directory = backbone_directory(found)
    frozen: dict[str, Any] = {}
    for part, specs in partition.frozen.items():
        # Adapters belong to the weights as the run computed with them.
        merged = partition.lora is not None and part == "backbone"
        frozen |= load(network, {part: specs}, directory, found["backbone_dtype"] if merged else dtype, mesh)
    return partition.whole(frozen, trainable, dtype)


def backbone_directory(found: Mapping[str, Any]) -> pathlib.Path:
    """The directory of the frozen weights, after its files have been compared with those of the training.

    Raises:
      UserError: they are not there, or are others.
    """
    directory = pathlib.Path(found["backbone"])
    kind = "its adapters" if "rank" in found else "its frozen layers"
    where = f'which model/prm.json of the run names as "backbone" of {kind}'
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory, {where}. If it has moved, name its new place there")
    if fingerprint(list_directory(directory).tensors) != found["backbone_sha256"]:
        trained = kind.replace("its", "the")
        raise UserError(f"{directory}, {where}, holds other weights than those that {trained} were trained on")
    return directory


def describe(partition: Partition, dtype: str) -> str:
    """For the log."""
    trained, whole = partition.parameters, parameters.count(partition.network)
    layers, adapters = partition.frozen_layers, partition.lora
    parts = []
    if layers:
        parts.append(f"embedding and the first {layers} of {partition.network.backbone.num_hidden_layers} layers")
    if adapters is not None:
        parts.append(f"rank {adapters.rank}, alpha {adapters.alpha:g}, on {', '.join(adapters.targets)}")
    what = "; adapters of ".join(parts)
    return (
        f"{what}: {trained:,} parameters ({trained / whole:.2%}), the head among them, are trained beside frozen "
        f"weights in {dtype}"
    )
