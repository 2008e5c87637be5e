"""The shape of a backbone and of a process reward model, read from and written to Hugging Face's config.json.

A setting of config.json that this implementation does not support is an error that names the key, so that a checkpoint
is never run as a different network.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import schema
from cfprm_jax.model_directory.file_schemas import BACKBONE, ROPE
from cfprm_jax.models.families import Family, family_of
from cfprm_jax.models.rope_scaling import Llama3Scaling

HEADS = ("linear", "mlp")
DTYPES = ("float32", "bfloat16")
REMATS = ("none", "mlp", "layer")

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
_ROPE_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_SCALING_KEYS = tuple(field.name for field in dataclasses.fields(Llama3Scaling))


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """The hyperparameters of a decoder, under the names of its config.json.

    Attributes:
      head_dim: width of one attention head, even (rotary embedding turns pairs).
      max_position_embeddings: the most tokens of a sequence.
      initializer_range: standard deviation of freshly initialised matrices.
      model_type: a key of :data:`cfprm_jax.models.families.FAMILIES`.
      attention_bias, mlp_bias: whether these projections have biases, where the family leaves it to config.json.
      rope_scaling: of the rotary frequencies; None leaves them.
      sliding_window: tokens that a token sees, itself among them, in some or all layers; None for all tokens before it.
        Sequences of no more tokens are computed exactly, and longer ones are an error (:meth:`check_length`).
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
    model_type: str = "qwen2"
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: Llama3Scaling | None = None
    sliding_window: int | None = None
    source: str = dataclasses.field(default="{}", repr=False, compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in BACKBONE and not (field.name == "sliding_window" and value is None):
                schema.check_value(field.name, value, BACKBONE[field.name].kind)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd; rotary embedding turns pairs of dimensions")
        for key, fixed in (("attention_bias", self.family.qkv_bias), ("mlp_bias", self.family.mlp_bias)):
            if fixed is not None and getattr(self, key):
                raise UserError(f"{key} true is not an option of model_type {self.model_type!r}")

    @property
    def family(self) -> Family:
        """The family of the model_type."""
        return family_of(self.model_type)

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.attention_bias if self.family.qkv_bias is None else self.family.qkv_bias

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias if self.family.output_bias is None else self.family.output_bias

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        return self.family.qk_norm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> BackboneConfig:
        """The configuration that a config.json, given as its JSON object, describes.

        Reads what transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write; absent optional keys have
        the defaults of transformers' classes.

        Raises:
          UserError: naming the key: it is missing, has a value of the wrong kind (see file_schemas.BACKBONE), or one
            that is not supported.
        """
        family = family_of(raw.get("model_type"))
        schema.check(raw, BACKBONE)
        for key, (plain, supported) in family.rules().items():
            value = raw.get(key)
            if value is not None and not plain(value):
                raise UserError(f"{key} {schema.shown(value)} is not supported; supported: {supported}")
        heads = raw["num_attention_heads"]
        values = {**family.defaults, **{key: raw[key] for key in _OPTIONAL if raw.get(key) is not None}}
        if "head_dim" not in values:
            if raw["hidden_size"] % heads:
                raise UserError(f"hidden_size {raw['hidden_size']} is not a multiple of num_attention_heads {heads}")
            values["head_dim"] = raw["hidden_size"] // heads
        # A null, and without a default an absent key, is multi-head attention without sharing.
        if "num_key_value_heads" not in values or ("num_key_value_heads" in raw and raw["num_key_value_heads"] is None):
            values["num_key_value_heads"] = heads
        theta, scaling = _rope(raw)
        return cls(
            **{key: raw[key] for key in _REQUIRED},
            **values,
            model_type=raw["model_type"],
            attention_bias=family.qkv_bias is None and bool(raw.get("attention_bias")),
            mlp_bias=family.mlp_bias is None and bool(raw.get("mlp_bias")),
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=family.window(raw),
            source=json.dumps(dict(raw)),
        )

    @property
    def longest(self) -> tuple[int, str]:
        """The most tokens of a sequence, and the key of config.json that bounds them."""
        if self.sliding_window is not None and self.sliding_window < self.max_position_embeddings:
            return self.sliding_window, "sliding_window"
        return self.max_position_embeddings, "max_position_embeddings"

    def check_length(self, max_length: int) -> None:
        """Raise UserError if max_length tokens exceed the positions or the attention window of the backbone."""
        most, key = self.longest
        if max_length > most:
            raise UserError(f"--max_length={max_length} is beyond the model's {key}={most}")

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this backbone: every field of the one it was read from, and what it describes itself.

        The rotary embedding stands both as rope_theta and rope_scaling (transformers 4, vLLM) and in rope_parameters
        (transformers 5).
        """
        own = {key: getattr(self, key) for key in (*_REQUIRED, *_OPTIONAL, "rope_theta", "model_type")}
        fixed = {"hidden_act": "silu", "attention_dropout": 0.0, **self.family.window_keys(self.sliding_window)}
        if self.family.qkv_bias is None:
            own["attention_bias"] = self.attention_bias
        if self.family.mlp_bias is None:
            own["mlp_bias"] = self.mlp_bias
        rope: dict[str, Any] = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {**dataclasses.asdict(self.rope_scaling), "rope_type": "llama3"}
            own["rope_scaling"] = rope
        kept = json.loads(self.source)
        if kept.get("sliding_window") is not None and not self.family.window_keys(None):
            # transformers ignores a window in this family, and this model was trained without; other readers apply it.
            fixed |= {"sliding_window": None, "use_sliding_window": False}
        default = self.family.defaults.get("head_dim", self.hidden_size // self.num_attention_heads)
        if "head_dim" not in kept and self.head_dim == default:
            del own["head_dim"]
        return {**kept, **fixed, **own, "rope_parameters": {**rope, "rope_theta": self.rope_theta}}


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """The base of the rotary embedding and the scaling of its frequencies; other scalings are an error."""
    theta, scaling = raw.get("rope_theta"), None
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        schema.check_value(key, rope, schema.record(ROPE))
        kind = rope.get("rope_type", rope.get("type", "default"))
        known = _ROPE_KEYS | set(_SCALING_KEYS) if kind == "llama3" else _ROPE_KEYS
        if kind not in ("default", "llama3") or set(rope) - known or rope.get("partial_rotary_factor", 1) != 1:
            raise UserError(
                f"{key} {schema.shown(rope)} is not supported; supported: null or rope_type 'default' or 'llama3'"
            )
        inner = rope.get("rope_theta")
        if inner is not None and theta is not None and inner != theta:
            raise UserError(f"{key} has rope_theta {inner}, beside rope_theta {theta}")
        theta = inner if theta is None else theta
        found = _llama3(key, rope) if kind == "llama3" else None
        if key == "rope_parameters" and raw.get("rope_scaling") is not None and found != scaling:
            raise UserError(f"rope_parameters {schema.shown(rope)} has another scaling than rope_scaling")
        scaling = found
    # transformers' default for these families when no key names it.
    return 10000.0 if theta is None else theta, scaling


def _llama3(key: str, rope: Mapping[str, Any]) -> Llama3Scaling:
    missing = [name for name in _SCALING_KEYS if rope.get(name) is None]
    if missing:
        raise UserError(f"{key}: missing {', '.join(missing)}")
    try:
        return Llama3Scaling(**{name: rope[name] for name in _SCALING_KEYS})
    except UserError as error:
        raise UserError(f"{key}.{error}") from error


@dataclasses.dataclass(frozen=True)
class PRMConfig:
    """A process reward model and how it computes.

    Attributes:
      backbone: the network below the head.
      head: "linear", or "mlp" for Linear-ReLU-Linear.
      dtype: type of activations and matrix products of the backbone; the head computes in float32 always.
      attention: backend of :func:`cfprm_jax.models.attention.attention`.
      remat: what the backward pass recomputes: "none", "mlp" for the MLPs, "layer" for all but its input.
      redundancy: whether the head has a second output, the logit of a step's redundancy.
    """

    backbone: BackboneConfig
    head: str = "linear"
    dtype: str = "float32"
    attention: str = "xla"
    remat: str = "none"
    redundancy: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("head", HEADS), ("dtype", DTYPES), ("remat", REMATS)):
            if getattr(self, name) not in choices:
                raise UserError(f"{name}: {getattr(self, name)!r} is not among: {', '.join(choices)}")
