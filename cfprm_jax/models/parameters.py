"""One description of each parameter, from which the abstract tree, the initialiser, import and export come.

Parameters are plain nested dicts of arrays. The layers of the backbone are stacked on axis 0 ("layers"), for
jax.lax.scan. Every matrix keeps the orientation in which Hugging Face files store it, [out, in]: import and export do
not transpose, a device's slice of rows is one contiguous piece of a file, and on CPU the bfloat16 forward product is
more than twice as fast as with [in, out] (float32 is the same).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.nn import initializers

from cfprm_jax.models.config import PRMConfig

Params = Mapping[str, Any]
"""A nested dict of arrays (or of what stands for them: specs, abstract arrays, shardings) of the specs' structure."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The specification of one parameter.

    Attributes:
      shape: its shape in memory; stacked parameters have the number of layers first.
      axes: the logical name of each dimension, which the training part maps to mesh axes. "layers", "vocab", "embed"
        (the residual stream), "heads" (heads * head_dim), "kv_heads" (kv_heads * head_dim), "mlp"; None for a dimension
        that is never sharded.
      kind: "matrix", "bias", "norm" or "embedding", for rules such as where weight decay applies.
      init: initialiser of a fresh parameter, as in jax.nn.initializers.
      hf_name: its tensor in a Hugging Face file, "{layer}" standing for the index of a stacked one.
      hf_form: "same": the tensor of the file is the parameter. "class_difference": the file may have one row (one
        label), which is the parameter, or two (two labels), and the parameter is row 1 - row 0: the softmax's second
        probability is the sigmoid of the difference. "third_class": row 2 of a tensor with three, whose other rows are
        another parameter's.
      dtype: a fixed type, or None to follow the run. The reward head is float32 always: it is small, and its output
        is what everything is ranked by.
      first_layer: of a stacked parameter, the layer of the network that index 0 is.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    kind: str
    init: Callable[..., jax.Array]
    hf_name: str
    hf_form: str = "same"
    dtype: str | None = None
    first_layer: int = 0

    @property
    def stacked(self) -> bool:
        """Whether axis 0 is the layer."""
        return self.axes[0] == "layers"

    def hf_names(self) -> list[str]:
        """The tensors that hold it, in the order of the layers."""
        if not self.stacked:
            return [self.hf_name]
        first = self.first_layer
        return [self.hf_name.format(layer=layer) for layer in range(first, first + self.shape[0])]

    def layers(self, first: int, end: int) -> ParamSpec:
        """Layers first .. end - 1 of a stacked parameter."""
        return dataclasses.replace(self, shape=(end - first, *self.shape[1:]), first_layer=self.first_layer + first)


def param_specs(config: PRMConfig) -> dict[str, Any]:
    """The nested dict of ParamSpec of a process reward model: {"backbone": ..., "head": ...}."""
    net = config.backbone
    layers, embed, mlp = net.num_hidden_layers, net.hidden_size, net.intermediate_size
    heads, kv_heads = net.num_attention_heads * net.head_dim, net.num_key_value_heads * net.head_dim
    normal = initializers.normal(net.initializer_range)
    widths = {"embed": embed, "mlp": mlp, "heads": heads, "kv_heads": kv_heads}

    def matrix(out: str, into: str, name: str) -> ParamSpec:
        shape, axes = (layers, widths[out], widths[into]), ("layers", out, into)
        return ParamSpec(shape, axes, "matrix", normal, f"model.layers.{{layer}}.{name}.weight")

    def linear(out: str, into: str, name: str, bias: bool) -> dict[str, ParamSpec]:
        kernel = matrix(out, into, name)
        if not bias:
            return {"kernel": kernel}
        # fsdp splits no vectors of the residual stream: norms and these are small.
        axes = ("layers", None if out == "embed" else out)
        hf_name = f"model.layers.{{layer}}.{name}.bias"
        return {"kernel": kernel, "bias": ParamSpec((layers, widths[out]), axes, "bias", initializers.zeros, hf_name)}

    def norm(name: str, width: int = embed) -> dict[str, ParamSpec]:
        hf_name = f"model.layers.{{layer}}.{name}.weight"
        return {"scale": ParamSpec((layers, width), ("layers", None), "norm", initializers.ones, hf_name)}

    attention = {
        "query": linear("heads", "embed", "self_attn.q_proj", net.qkv_bias),
        "key": linear("kv_heads", "embed", "self_attn.k_proj", net.qkv_bias),
        "value": linear("kv_heads", "embed", "self_attn.v_proj", net.qkv_bias),
        "output": linear("embed", "heads", "self_attn.o_proj", net.output_bias),
    }
    if net.qk_norm:
        attention["query_norm"] = norm("self_attn.q_norm", net.head_dim)
        attention["key_norm"] = norm("self_attn.k_norm", net.head_dim)

    backbone = {
        "embedding": ParamSpec(
            (net.vocab_size, embed), ("vocab", "embed"), "embedding", normal, "model.embed_tokens.weight"
        ),
        "layers": {
            "attention_norm": norm("input_layernorm"),
            "attention": attention,
            "mlp_norm": norm("post_attention_layernorm"),
            "mlp": {
                "gate": linear("mlp", "embed", "mlp.gate_proj", net.mlp_bias),
                "up": linear("mlp", "embed", "mlp.up_proj", net.mlp_bias),
                "down": linear("embed", "mlp", "mlp.down_proj", net.mlp_bias),
            },
        },
        "final_norm": {"scale": ParamSpec((embed,), (None,), "norm", initializers.ones, "model.norm.weight")},
    }
    return {"backbone": backbone, "head": _head_specs(config)}


def _head_specs(config: PRMConfig) -> dict[str, Any]:
    embed = config.backbone.hidden_size
    normal = initializers.normal(config.backbone.initializer_range)

    def linear(out: int, name: str, form: str) -> dict[str, ParamSpec]:
        return {
            "kernel": ParamSpec((out, embed), (None, None), "matrix", normal, f"{name}.weight", form, "float32"),
            "bias": ParamSpec((out,), (None,), "bias", initializers.zeros, f"{name}.bias", form, "float32"),
        }

    name = "score" if config.head == "linear" else "score.2"
    return {
        **({"hidden": linear(embed, "score.0", "same")} if config.head == "mlp" else {}),
        "output": linear(1, name, "class_difference"),
        **({"redundancy": linear(1, name, "third_class")} if config.redundancy else {}),
    }


def walk(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested dict with its path, "backbone.layers.mlp.up.kernel", in the order of the dict."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def map_specs(function: Callable[[str, ParamSpec], T], config: PRMConfig) -> dict[str, Any]:
    """function(path, spec) of every parameter, as a nested dict of the parameters' structure."""
    return map_tree(function, param_specs(config))


def map_tree(function: Callable[[str, ParamSpec], T], specs: Mapping[str, Any]) -> dict[str, Any]:
    """function(path, spec) of every spec of a nested dict, in its structure."""

    def over(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {
            key: over(value, f"{prefix}{key}.") if isinstance(value, Mapping) else function(prefix + key, value)
            for key, value in tree.items()
        }

    return over(specs, "")


def lookup(tree: Mapping[str, Any], path: str) -> Any:
    """The leaf (or subtree) at a path of :func:`walk`."""
    for key in path.split("."):
        tree = tree[key]
    return tree


def param_dtype(spec: ParamSpec, dtype: Any) -> Any:
    """The type in which a parameter is held in a run whose parameters are of this dtype."""
    return jnp.dtype(spec.dtype or dtype)


def abstract_tree(
    specs: Mapping[str, Any], dtype: Any = jnp.float32, shardings: Params | None = None
) -> dict[str, Any]:
    """The parameters of a nested dict of specs as jax.ShapeDtypeStruct, with shardings (same structure) if given."""

    def one(path: str, spec: ParamSpec) -> jax.ShapeDtypeStruct:
        sharding = None if shardings is None else lookup(shardings, path)
        return jax.ShapeDtypeStruct(spec.shape, param_dtype(spec, dtype), sharding=sharding)

    return map_tree(one, specs)


def init_param(path: str, spec: ParamSpec, key: jax.Array, dtype: Any) -> jax.Array:
    """A fresh parameter. Its values depend on key and path alone, so adding a parameter changes no other."""
    own_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    return spec.init(own_key, spec.shape, param_dtype(spec, dtype))


def init_params(config: PRMConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Fresh parameters: matrices and embeddings normal with initializer_range, biases 0, norm scales 1.

    A pure function: under jax.jit with out_shardings the parameters never exist unsharded.
    """
    return map_specs(lambda path, spec: init_param(path, spec, key, dtype), config)


def count(config: PRMConfig) -> int:
    """The number of parameters."""
    total = 0
    for _, spec in walk(param_specs(config)):
        size = 1
        for n in spec.shape:
            size *= n
        total += size
    return total
