"""Which parameters of a network are trained: all, those above frozen lower layers, or adapters and the head.

A partition divides the parameters into two nested dicts. `trainable` is what an optimizer and a checkpoint hold;
`frozen` stays as it was loaded, and no gradient of it is computed:

    trained                    frozen                                     trainable
    everything                 {}                                         {"backbone", "head"}
    layers K and above         {"trunk": {"embedding", "layers"}}         {"backbone": {"layers", "final_norm"}, "head"}
    adapters                   {"backbone"}                               {"backbone": adapters, "head"}
    adapters of layers >= K    {"trunk": ..., "backbone": the others}     {"backbone": adapters, "head"}

The trunk is the embedding and the K lowest layers. Where it has all layers, the final norm is frozen too, and the head
alone is trained. Both together (:meth:`Partition.join`) are what the forward pass takes (:func:`.prm.apply`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax.errors import UserError
from cfprm_jax.models import lora as adapters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import Params, ParamSpec, map_tree, param_specs, walk


@dataclasses.dataclass(frozen=True)
class Partition:
    """What of a network is trained.

    Attributes:
      network: the PRM.
      frozen_layers: K, the lowest layers that keep their weights, and the embedding with them; 0 freezes neither.
      lora: adapters, which are then trained in place of the layers above; None trains the layers.
      cached: the trunk's output comes with each batch, so that its parameters are not needed.

    Raises:
      UserError: there are fewer than K layers, or none is left for adapters.
    """

    network: PRMConfig
    frozen_layers: int = 0
    lora: Lora | None = None
    cached: bool = False

    def __post_init__(self) -> None:
        frozen, layers = self.frozen_layers, self.network.backbone.num_hidden_layers
        if frozen > layers:
            raise UserError(f"--frozen_layers={frozen}: the backbone has {layers} layers")
        if self.lora is not None and frozen == layers:
            raise UserError(
                f"--frozen_layers={frozen} freezes all {layers} layers and leaves none to the adapters of "
                f"--lora_rank={self.lora.rank}"
            )
        if self.cached and not frozen:
            raise ValueError("without frozen layers there is no trunk whose output could be cached")

    @property
    def trunk(self) -> dict[str, ParamSpec | dict[str, Any]]:
        """Specs of embedding and frozen layers: {"embedding", "layers"}; empty without."""
        if not self.frozen_layers:
            return {}
        backbone = param_specs(self.network)["backbone"]
        return {
            "embedding": backbone["embedding"],
            "layers": map_tree(lambda _, spec: spec.layers(0, self.frozen_layers), backbone["layers"]),
        }

    @property
    def frozen(self) -> dict[str, Any]:
        """Specs of what the forward pass needs and nothing trains."""
        trunk = {"trunk": self.trunk} if self.frozen_layers and not self.cached else {}
        if self.lora is not None:
            return {**trunk, "backbone": self._above}
        return {**trunk, "backbone": self._above} if self._head_only else trunk

    @property
    def trainable(self) -> dict[str, Any]:
        """Specs of what is trained."""
        if self.lora is not None:
            return adapters.trainable_specs(self.network, self.lora, self.frozen_layers)
        head = param_specs(self.network)["head"]
        return {"head": head} if self._head_only else {"backbone": self._above, "head": head}

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(math.prod(spec.shape) for _, spec in walk(self.trainable))

    def join(self, frozen: Params, trainable: Params) -> dict[str, Any]:
        """Both in one, for the forward pass."""
        return adapters.combine(frozen, trainable, 1.0 if self.lora is None else self.lora.scale)

    def whole(self, frozen: Params, trainable: Params, dtype: Any) -> dict[str, Any]:
        """The parameters as one nested dict, of the structure of param_specs(network), with adapters merged.

        Args:
          frozen: arrays of dtype; they are used up.
          trainable: arrays of dtype, but for adapters, which are float32; and a float32 head.
        """
        above = {"backbone": frozen["backbone"]} if "backbone" in frozen else {}
        if self.lora is not None:
            above = adapters.merge(self.network, above, trainable, self.lora, dtype)
        else:
            above = adapters.combine(above, trainable, 1.0)
        if not self.frozen_layers:
            return above
        trunk, upper = frozen["trunk"], above["backbone"]
        layers = _stacked(trunk["layers"], upper["layers"]) if "layers" in upper else trunk["layers"]
        return {**above, "backbone": {**upper, "embedding": trunk["embedding"], "layers": layers}}

    @property
    def _head_only(self) -> bool:
        return self.lora is None and self.frozen_layers == self.network.backbone.num_hidden_layers

    @property
    def _above(self) -> dict[str, Any]:
        """Specs of the backbone without its trunk."""
        backbone, first = param_specs(self.network)["backbone"], self.frozen_layers
        if not first:
            return backbone
        layers = map_tree(lambda _, spec: spec.layers(first, spec.shape[0]), backbone["layers"])
        final_norm = {"final_norm": backbone["final_norm"]}
        return final_norm if first == self.network.backbone.num_hidden_layers else {"layers": layers, **final_norm}


def without_trunk(params: Params, frozen_layers: int) -> dict[str, Any]:
    """The parameters above the trunk, out of those of a whole network: what :func:`.prm.apply` needs with `hidden`."""
    backbone = params["backbone"]
    above = {"final_norm": backbone["final_norm"]}
    leaves = jax.tree.leaves(backbone["layers"])
    if leaves[0].shape[0] > frozen_layers:
        above["layers"] = jax.tree.map(lambda leaf: leaf[frozen_layers:], backbone["layers"])
    return {"backbone": above, "head": params["head"]}


def trunk_of(params: Params, frozen_layers: int) -> dict[str, Any]:
    """{"embedding", "layers"} of the lowest layers, out of the parameters of a whole network."""
    backbone = params["backbone"]
    layers = jax.tree.map(lambda leaf: leaf[:frozen_layers], backbone["layers"])
    return {"embedding": backbone["embedding"], "layers": layers}


def _stacked(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Layers above layers, a parameter at a time; the lower ones are used up."""
    out: dict[str, Any] = {}
    for key, value in lower.items():
        if isinstance(value, Mapping):
            out[key] = _stacked(value, upper[key])
            continue
        stack = jax.jit(lambda a, b: jnp.concatenate([a, b]), out_shardings=value.sharding)
        out[key] = stack(value, upper[key])
        value.delete()
    return out
