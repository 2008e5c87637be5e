"""The supported families of decoders, by the model_type of their config.json: what each sets in the one decoder here.

Qwen2, Qwen3, Llama and Mistral differ in biases, in norms of queries and keys, in defaults and in names of classes. A
new family of this kind is one more entry of FAMILIES; what a family needs beyond that is a new switch of
:class:`cfprm_jax.models.config.BackboneConfig`, which :mod:`cfprm_jax.models.layers` computes for training, scoring and
sampling alike.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from cfprm_jax.errors import UserError

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value of a key is supported, and which values are, for the error. Not called for an absent or null key."""

_QWEN_WINDOW, _QWEN_FULL_LAYERS, _MISTRAL_WINDOW = 4096, 28, 4096  # transformers' defaults


def _qwen_window(raw: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one: those named by layer_types, or those from max_window_layers on."""
    types = raw.get("layer_types")
    if not raw.get("use_sliding_window"):
        if types is not None and "sliding_attention" in types:
            raise UserError("layer_types has sliding_attention, beside use_sliding_window false")
        return None
    full = _or(raw.get("max_window_layers"), _QWEN_FULL_LAYERS)
    slides = full < raw["num_hidden_layers"] if types is None else "sliding_attention" in types
    return _or(raw.get("sliding_window"), _QWEN_WINDOW) if slides else None


def _qwen_window_keys(window: int | None) -> dict[str, Any]:
    return {"use_sliding_window": window is not None, **({} if window is None else {"sliding_window": window})}


def _or(value: Any, default: int) -> int:
    return default if value is None else value


@dataclasses.dataclass(frozen=True)
class Family:
    """The architecture of a model_type.

    Attributes:
      classes: first part of the names of its classes in transformers, as in Qwen2ForTokenClassification.
      qkv_bias, output_bias, mlp_bias: whether these projections have biases; None where config.json decides, by
        attention_bias for the first two and by mlp_bias.
      qk_norm: queries and keys are normed, each head on its own, before the rotary embedding.
      defaults: values of absent keys where they are not those of BackboneConfig; as in transformers.
      window: the sliding window of the attention, from config.json; None where every token sees all before it. The
        default ignores the keys of a window, as transformers does in this family.
      window_keys: keys of config.json for a window, as export writes them.
      layer_types: values that layer_types may have.
      reward_classes: vLLM has {classes}ForProcessRewardModel and {classes}ForRewardModel.
    """

    classes: str
    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    window: Callable[[Mapping[str, Any]], int | None] = lambda raw: None
    window_keys: Callable[[int | None], dict[str, Any]] = lambda window: {}
    layer_types: frozenset[str] = frozenset({"full_attention"})
    reward_classes: bool = False

    def rules(self) -> dict[str, Rule]:
        """Keys of config.json that change the computation, with the values that are supported in this family."""
        rules: dict[str, Rule] = {
            "hidden_act": (lambda value: value == "silu", "silu"),
            "layer_types": (lambda value: set(value) <= self.layer_types, " or ".join(sorted(self.layer_types))),
            "use_mrope": (lambda value: not value, "false"),
            "attention_dropout": (lambda value: value == 0, "0"),
            "use_qk_norm": (lambda value: value == self.qk_norm, str(self.qk_norm).lower()),
            "qk_norm": (lambda value: value == self.qk_norm, str(self.qk_norm).lower()),
            "attn_logit_softcapping": (lambda value: not value, "null"),
            "final_logit_softcapping": (lambda value: not value, "null"),
            "partial_rotary_factor": (lambda value: value == 1, "1"),
            "quantization_config": (lambda value: False, "null (weights in bfloat16, float16 or float32)"),
        }
        for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
            rules[key] = (lambda value: not value, "null (no mixture of experts)")
        for key, fixed in (("attention_bias", self.qkv_bias), ("qkv_bias", self.qkv_bias), ("mlp_bias", self.mlp_bias)):
            if fixed is not None:
                whose = " (q, k and v have biases)" if fixed else ""
                rules[key] = (functools.partial(operator.is_, fixed), str(fixed).lower() + whose)
        return rules


_EITHER = frozenset({"full_attention", "sliding_attention"})

FAMILIES: dict[str, Family] = {
    # Qwen2 Technical Report, https://arxiv.org/abs/2407.10671
    "qwen2": Family(
        "Qwen2",
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        window=_qwen_window,
        window_keys=_qwen_window_keys,
        layer_types=_EITHER,
        reward_classes=True,
    ),
    # Qwen3 Technical Report, https://arxiv.org/abs/2505.09388
    "qwen3": Family(
        "Qwen3",
        qkv_bias=None,
        output_bias=None,
        mlp_bias=False,
        qk_norm=True,
        defaults={"head_dim": 128, "num_key_value_heads": 32},
        window=_qwen_window,
        window_keys=_qwen_window_keys,
        layer_types=_EITHER,
    ),
    # The Llama 3 Herd of Models, https://arxiv.org/abs/2407.21783
    "llama": Family(
        "Llama", qkv_bias=None, output_bias=None, mlp_bias=None, defaults={"max_position_embeddings": 2048}
    ),
    # Mistral 7B, https://arxiv.org/abs/2310.06825
    "mistral": Family(
        "Mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        # A null window is none, an absent one the default.
        window=lambda raw: raw.get("sliding_window", _MISTRAL_WINDOW),
        window_keys=lambda window: {"sliding_window": window},
        layer_types=frozenset(),
    ),
}


def family_of(model_type: Any) -> Family:
    """The family of a model_type. UserError for one that is not supported."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(map(repr, FAMILIES))
        raise UserError(f"model_type {model_type!r} is not supported; supported: {supported}")
    return FAMILIES[model_type]
