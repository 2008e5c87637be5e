"""Runs with adapters: the frozen backbone, its source, and the merged model that scoring and export use.

Checkpoints of such a run contain adapters, head and their optimizer state. The backbone is not copied: prm.json of the
run stores its directory and a fingerprint. Resume, scoring and export load it from there, after its files have been
compared with the fingerprint.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.huggingface.safetensors_files import fingerprint, list_directory
from cfprm_jax.models import lora, parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.sharding import rules


@dataclasses.dataclass(frozen=True)
class Base:
    """The backbone of adapters.

    Attributes:
      frozen: {"backbone": ...} in the type that the run computes in.
      head: of the directory, or fresh.
      report: what was loaded, for the log.
    """

    frozen: dict[str, Any]
    head: Any
    report: str

    def initial_params(self, network: PRMConfig, adapters: Lora, key: jax.Array, mesh: Mesh) -> dict[str, Any]:
        """The trainable parameters before the first step."""
        specs = lora.trainable_specs(network, adapters)
        shardings = rules.param_shardings(mesh, {"backbone": specs["backbone"]})
        fresh = jax.jit(lambda key: lora.init_adapters(specs, key), out_shardings=shardings)(key)
        return {**fresh, "head": self.head}


def load_base(directory: pathlib.Path, network: PRMConfig, dtype: str, mesh: Mesh, head_key: jax.Array) -> Base:
    """The backbone of a Hugging Face directory and, if it is a PRM, its head."""
    shardings = rules.param_shardings(mesh, parameters.param_specs(network))
    params, report = loading.load_params(
        directory, network, shardings=shardings, dtype=jnp.dtype(dtype), head_key=head_key
    )
    return Base({"backbone": params["backbone"]}, params["head"], str(report))


def record(adapters: Lora, directory: pathlib.Path, dtype: str) -> dict[str, Any]:
    """The entry of prm.json about the adapters and their backbone."""
    tensors = list_directory(directory).tensors
    return {
        **dataclasses.asdict(adapters),
        "targets": list(adapters.targets),
        "backbone": str(directory.resolve()),
        "backbone_dtype": dtype,
        "backbone_fingerprint": fingerprint(tensors),
    }


def from_record(described: Mapping[str, Any]) -> Lora:
    """The adapters that prm.json describes."""
    return Lora(described["rank"], described["alpha"], tuple(described["targets"]))


def merged(
    described: Mapping[str, Any], trainable: parameters.Params, network: PRMConfig, dtype: Any, mesh: Mesh
) -> dict[str, Any]:
    """The parameters of the same model without adapters.

    Args:
      described: of prm.json.
      trainable: adapters and head.

    Raises:
      UserError: the backbone is not where it was, or is another.
    """
    directory = backbone_directory(described)
    base = load_base(directory, network, described["backbone_dtype"], mesh, jax.random.key(0))
    return lora.merge(network, base.frozen, trainable, from_record(described), dtype)


def backbone_directory(described: Mapping[str, Any]) -> pathlib.Path:
    """The directory of the backbone, after its files have been compared with those of the training.

    Raises:
      UserError: it is not there, or is another.
    """
    directory = pathlib.Path(described["backbone"])
    where = 'which model/prm.json of the run names as "backbone" of its adapters'
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory, {where}. If it has moved, name its new place there")
    if fingerprint(list_directory(directory).tensors) != described["backbone_fingerprint"]:
        raise UserError(f"{directory}, {where}, holds other weights than those that the adapters were trained on")
    return directory


def describe(network: PRMConfig, adapters: Lora, dtype: str) -> str:
    """For the log."""
    trained = sum(math.prod(spec.shape) for _, spec in parameters.walk(lora.trainable_specs(network, adapters)))
    share = trained / parameters.count(network)
    return (
        f"rank {adapters.rank}, alpha {adapters.alpha:g}, on {', '.join(adapters.targets)}: {trained:,} parameters "
        f"({share:.2%}), the head among them, are trained beside a frozen backbone in {dtype}"
    )
