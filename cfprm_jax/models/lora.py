"""Low-rank adapters: beside a frozen kernel W a trained product B A of rank r; y = x W^T + (alpha / r) x A^T B^T.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. A begins as PEFT's does (Kaiming uniform with a = sqrt(5), which is
uniform in +-1 / sqrt(in)), B as 0: before the first step the adapted model is the model. Only adapters and the reward
head are trained; everything else is the frozen part, which no optimizer and no checkpoint holds.

Three nested dicts belong together: `frozen` {"backbone": ...}, as loaded; `trainable` {"backbone": adapters of the
targets, "head": ...}; and what the forward pass gets, both in one (:func:`combine`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax.errors import UserError
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params, ParamSpec, init_param, map_tree, param_dtype, param_specs, walk

# Name here -> name of the module in transformers, which --lora_targets also takes.
TARGETS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
      rank: r, at least 1.
      alpha: the product counts alpha / rank.
      targets: names of TARGETS, in that order.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise UserError(f"adapters of rank {self.rank} and alpha {self.alpha}: both must be positive")

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank


def parse(rank: int, alpha: float, targets: Sequence[str]) -> Lora | None:
    """The adapters that the flags describe; None for rank 0.

    Raises:
      UserError: a target that is unknown or named twice, or none.
    """
    if rank == 0:
        return None
    own = {theirs: name for name, theirs in TARGETS.items()}
    names = [own.get(target, target) for target in targets]
    unknown = [target for target, name in zip(targets, names, strict=True) if name not in TARGETS]
    if unknown or not names:
        known = ", ".join(f"{name} ({theirs})" for name, theirs in TARGETS.items())
        raise UserError(f"--lora_targets: {', '.join(unknown) or 'nothing'} is not among: {known}")
    if len(set(names)) != len(names):
        raise UserError(f"--lora_targets={','.join(targets)} names one target twice")
    return Lora(rank, alpha, tuple(name for name in TARGETS if name in names))


def trainable_specs(config: PRMConfig, lora: Lora, first_layer: int = 0) -> dict[str, Any]:
    """Specs of what is trained: an adapter for each target, {"lora_a", "lora_b"} in place of its kernel, and the head.

    hf_name is the tensor of an adapter in PEFT's files.

    Args:
      first_layer: the layers below it have no adapters.
    """
    specs = param_specs(config)
    adapters: dict[str, Any] = {}
    for path, spec in walk(specs["backbone"]):
        *above, leaf = path.split(".")
        if leaf == "kernel" and above[-1] in lora.targets:
            place = functools.reduce(lambda tree, key: tree.setdefault(key, {}), above, adapters)
            place |= _adapter(spec.layers(first_layer, spec.shape[0]), lora.rank)
    return {"backbone": adapters, "head": specs["head"]}


def _adapter(kernel: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    (layers, out, into), (_, out_axis, in_axis) = kernel.shape, kernel.axes
    name = "base_model.model." + kernel.hf_name.removesuffix("weight")
    first = ParamSpec(
        (layers, rank, into), ("layers", None, in_axis), "matrix", _kaiming_uniform, f"{name}lora_A.weight"
    )
    second = ParamSpec(
        (layers, out, rank), ("layers", out_axis, None), "matrix", jax.nn.initializers.zeros, f"{name}lora_B.weight"
    )
    from_layer = functools.partial(dataclasses.replace, first_layer=kernel.first_layer)
    return {"lora_a": from_layer(first), "lora_b": from_layer(second)}


def _kaiming_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def init_adapters(specs: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
    """Fresh float32 adapters, {"backbone": ...}, of trainable_specs; a pure function, as init_params is."""
    return map_tree(lambda path, spec: init_param(path, spec, key, jnp.float32), {"backbone": specs["backbone"]})


def combine(frozen: Params, trainable: Params, scale: float) -> dict[str, Any]:
    """Both in one, for the forward pass; the scale goes into lora_b. Without anything frozen, the trainable part."""

    def scaled(path: str, value: Any) -> Any:
        return value * scale if path == "lora_b" else value

    def over(left: Any, right: Any) -> dict[str, Any]:
        out = dict(left)
        for key, value in right.items():
            out[key] = over(left.get(key, {}), value) if isinstance(value, Mapping) else scaled(key, value)
        return out

    return over(frozen, trainable)


def merge(config: PRMConfig, frozen: Params, trainable: Params, lora: Lora, dtype: Any) -> dict[str, Any]:
    """The parameters of a model without adapters that computes the same: W + (alpha / r) B A.

    Summed in float32 and rounded to dtype once. frozen is used up: each of its kernels makes room for the merged one.
    Of a part of the network (:mod:`cfprm_jax.models.partition`) it gives that part.
    """
    both = combine(frozen, trainable, 1.0)

    def over(tree: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, spec in specs.items():
            if key not in tree:
                continue
            if isinstance(spec, Mapping):
                out[key] = over(tree[key], spec)
            elif key == "kernel" and "lora_a" in tree:
                out[key] = _merged(tree[key], tree["lora_a"], tree["lora_b"], lora.scale, param_dtype(spec, dtype))
            else:
                out[key] = _cast(tree[key], param_dtype(spec, dtype))
        return out

    return over(both, param_specs(config))


def _merged(kernel: jax.Array, first: jax.Array, second: jax.Array, scale: float, dtype: Any) -> jax.Array:
    def one(layer: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        w, a, b = (x.astype(jnp.float32) for x in layer)
        return (w + scale * jnp.einsum("or,ri->oi", b, a, precision=jax.lax.Precision.HIGHEST)).astype(dtype)

    # A layer at a time: a float32 product of all of them would be as large as the parameter twice over.
    function = jax.jit(lambda *layers: jax.lax.map(one, layers), out_shardings=kernel.sharding)
    merged = function(kernel, first, second)
    kernel.delete()
    return merged


def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    if leaf.dtype == dtype:
        return leaf
    cast = jax.jit(lambda x: x.astype(dtype), out_shardings=leaf.sharding)(leaf)
    leaf.delete()
    return cast
