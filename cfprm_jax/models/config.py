"""The shape of a Qwen2 backbone and of a process reward model, read from and written to Hugging Face's config.json.

What config.json may say and this implementation does not compute is refused by name, so that a checkpoint is never run
as something that it is not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import schema
from cfprm_jax.huggingface.file_schemas import BACKBONE, ROPE

HEADS = ("linear", "mlp")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "mlp", "layer")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

# Keys that change the computation, with the values that leave it the plain Qwen2 one. None stands for "not set".
_SUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda value: value == "silu", "silu"),
    "use_sliding_window": (lambda value: not value, "false"),
    "layer_types": (lambda value: set(value) <= {"full_attention"}, "full_attention in every layer"),
    "use_mrope": (lambda value: not value, "false"),
    "attention_bias": (lambda value: value is True, "true (q, k and v have biases)"),
    "qkv_bias": (lambda value: value is True, "true (q, k and v have biases)"),
    "mlp_bias": (lambda value: not value, "false"),
    "attention_dropout": (lambda value: value == 0, "0"),
    "use_qk_norm": (lambda value: not value, "false"),
    "qk_norm": (lambda value: not value, "false"),
    "attn_logit_softcapping": (lambda value: not value, "null"),
    "partial_rotary_factor": (lambda value: value == 1, "1"),
    "quantization_config": (lambda value: False, "null (weights in bfloat16, float16 or float32)"),
}


@dataclasses.dataclass(frozen=True)
class Qwen2Config:
    """The hyperparameters of a Qwen2 or Qwen2.5 backbone, under the names of its config.json.

    Attributes:
      head_dim: width of one attention head, even (rotary embedding turns pairs).
      initializer_range: standard deviation of freshly initialised matrices.
      source: the config.json that it was read from, as JSON text, so that an export keeps every field; "{}" for a
        configuration made here. Two configurations that differ in nothing else are equal.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    source: str = dataclasses.field(default="{}", repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in BACKBONE:
                schema.check_value(field.name, getattr(self, field.name), BACKBONE[field.name].kind)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of dimensions")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Qwen2Config:
        """The configuration that a config.json, given as its JSON object, describes.

        Reads what transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write; absent optional keys have
        the defaults of transformers' Qwen2Config.

        Raises:
          UserError: naming the key: it is missing, has a value of the wrong kind (see file_schemas.BACKBONE), or one
            that is not supported.
        """
        if raw.get("model_type") != "qwen2":
            raise UserError(f"model_type {raw.get('model_type')!r} is not supported; supported: 'qwen2'")
        schema.check(raw, BACKBONE)
        for key, (plain, supported) in _SUPPORTED.items():
            value = raw.get(key)
            if value is not None and not plain(value):
                raise UserError(f"{key} {schema.shown(value)} is not supported; supported: {supported}")
        heads = raw["num_attention_heads"]
        head_dim = raw.get("head_dim")
        if head_dim is None:
            if raw["hidden_size"] % heads:
                raise UserError(f"hidden_size {raw['hidden_size']} is not a multiple of num_attention_heads {heads}")
            head_dim = raw["hidden_size"] // heads
        optional = {
            key: raw[key]
            for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "initializer_range")
            if raw.get(key) is not None
        }
        # A key absent or null is multi-head attention without sharing.
        kv_heads = heads if raw.get("num_key_value_heads") is None else raw["num_key_value_heads"]
        return cls(
            **{key: raw[key] for key in _REQUIRED},
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=_rope_theta(raw),
            source=json.dumps(dict(raw)),
            **optional,
        )

    def refuse_length(self, max_length: int) -> None:
        """UserError if solutions of so many tokens are beyond the positions that the backbone was made for."""
        if max_length > self.max_position_embeddings:
            raise UserError(
                f"--max_length={max_length} is beyond the model's max_position_embeddings="
                f"{self.max_position_embeddings}"
            )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this backbone: every field of the one it was read from, and what it describes itself.

        The base of the rotary embedding stands both as rope_theta (transformers 4, vLLM) and in rope_parameters
        (transformers 5).
        """
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "source"}
        rope = {"rope_theta": self.rope_theta, "rope_type": "default"}
        fixed = {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False, "attention_dropout": 0.0}
        kept = json.loads(self.source)
        if "head_dim" not in kept and self.head_dim * self.num_attention_heads == self.hidden_size:
            del own["head_dim"]
        return {**kept, **fixed, **own, "rope_parameters": rope}


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """The base of the rotary embedding; any scaling of its frequencies is refused by name."""
    theta = raw.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        schema.check_value(key, rope, schema.record(ROPE))
        kind = rope.get("rope_type", rope.get("type", "default"))
        unknown = sorted(set(rope) - _ROPE_KEYS)
        if kind != "default" or unknown or rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(f"{key} {schema.shown(rope)} is not supported; supported: null or rope_type 'default'")
        inner = rope.get("rope_theta")
        if inner is not None and theta is not None and inner != theta:
            raise UserError(f"{key} has rope_theta {inner}, beside rope_theta {theta}")
        theta = inner if theta is None else theta
    # transformers' default for Qwen2 when no key names it.
    return 10000.0 if theta is None else theta


@dataclasses.dataclass(frozen=True)
class PRMConfig:
    """A process reward model and how it computes.

    Attributes:
      backbone: the Qwen2 network.
      head: "linear", or "mlp" for Linear-ReLU-Linear.
      dtype: type of activations and matrix products of the backbone; the head computes in float32 always.
      attention: backend of :func:`cfprm_jax.models.attention.attention`.
      remat: what the backward pass recomputes: "none", "mlp" for the MLPs, "layer" for all but its input.
    """

    backbone: Qwen2Config
    head: str = "linear"
    dtype: str = "float32"
    attention: str = "xla"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name, choices in (("head", HEADS), ("dtype", DTYPES), ("remat", REMATS)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}: {getattr(self, name)!r} is not among: {', '.join(choices)}")
