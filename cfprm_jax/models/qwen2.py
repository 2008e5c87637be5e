"""The Qwen2 decoder as Flax NNX modules over given parameters.

A module takes the nested dict of its parameters (see :mod:`cfprm_jax.models.parameters`) and holds them as nnx.Param.
The layers are one DecoderLayer whose parameters are stacked on axis 0; nnx.split takes it apart and plain jax.lax.scan
runs it, so compile time does not grow with depth. Weights are cast to the compute dtype where they are used: float32
masters need no bfloat16 copy of the whole model.

Architecture: Qwen2 Technical Report, https://arxiv.org/abs/2407.10671.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention import attention
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.placement import Placement, unconstrained
from cfprm_jax.models.products import times


class Linear(nnx.Module):
    """x W^T + b in the dtype of x, for a kernel [out, in] and an optional bias [out].

    With an adapter (:mod:`cfprm_jax.models.lora`), lora_a [rank, in] and lora_b [out, rank], also + (x A^T) B^T.
    """

    def __init__(self, params: Params):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.lora_a = nnx.Param(params["lora_a"]) if "lora_a" in params else None
        self.lora_b = nnx.Param(params["lora_b"]) if "lora_b" in params else None

    def __call__(self, x: Float[Array, "... into"]) -> Float[Array, "... out"]:
        y = times(x, self.kernel[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        if self.lora_a is not None and self.lora_b is not None:
            y = y + times(times(x, self.lora_a[...]), self.lora_b[...])
        return y


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32, returned in the dtype of x."""

    def __init__(self, params: Params, eps: float):
        self.scale = nnx.Param(params["scale"])
        self.eps = eps

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rotary_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Radians a position, float32 [head_dim / 2]: theta^(-2i / head_dim).

    Computed on the host, and rounded to float32 where the torch implementation rounds: at position 32,768 the last bit
    of a frequency is 0.002 radians, and the power function of an accelerator is not exact to that bit.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1) / np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def rotary_angles(
    positions: Int[Array, "rows length"], head_dim: int, theta: float
) -> tuple[Float[Array, "rows length half"], Float[Array, "rows length half"]]:
    """Cosine and sine of each position's angles, float32 (bfloat16 cannot tell positions above 256 apart)."""
    angles = positions.astype(jnp.float32)[..., None] * rotary_frequencies(head_dim, theta)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "rows length heads head_dim"],
    cosine: Float[Array, "rows length half"],
    sine: Float[Array, "rows length half"],
) -> Float[Array, "rows length heads head_dim"]:
    """Rotary embedding of the pairs (x[i], x[i + head_dim / 2]), in float32, returned in the dtype of x.

    RoFormer, https://arxiv.org/abs/2104.09864, in the half-split layout of Hugging Face's Llama and Qwen weights.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions; q, k and v have biases, the output has none."""

    def __init__(self, config: PRMConfig, params: Params):
        self.config = config
        self.query, self.key = Linear(params["query"]), Linear(params["key"])
        self.value, self.output = Linear(params["value"]), Linear(params["output"])

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        cosine: Float[Array, "rows length half"],
        sine: Float[Array, "rows length half"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
    ) -> Float[Array, "rows length embed"]:
        net = self.config.backbone
        rows, length, _ = x.shape
        q = self.query(x).reshape(rows, length, net.num_attention_heads, net.head_dim)
        k = self.key(x).reshape(rows, length, net.num_key_value_heads, net.head_dim)
        v = self.value(x).reshape(rows, length, net.num_key_value_heads, net.head_dim)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        mixed = attention(q, k, v, subtree_end, self.config.attention, constrain)
        return self.output(mixed.reshape(rows, length, net.num_attention_heads * net.head_dim))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, params: Params):
        self.gate, self.up, self.down = Linear(params["gate"]), Linear(params["up"]), Linear(params["down"])

    def __call__(self, x: Float[Array, "rows length embed"]) -> Float[Array, "rows length embed"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: PRMConfig, params: Params):
        eps = config.backbone.rms_norm_eps
        self.attention_norm = RMSNorm(params["attention_norm"], eps)
        self.attention = SelfAttention(config, params["attention"])
        self.mlp_norm = RMSNorm(params["mlp_norm"], eps)
        self.mlp = MLP(params["mlp"])
        self.remat_mlp = config.remat == "mlp"

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        cosine: Float[Array, "rows length half"],
        sine: Float[Array, "rows length half"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
    ) -> Float[Array, "rows length embed"]:
        x = x + self.attention(self.attention_norm(x), cosine, sine, subtree_end, constrain)
        feed_forward = self._feed_forward
        if self.remat_mlp:
            feed_forward = jax.checkpoint(feed_forward, prevent_cse=False)  # as in Qwen2
        return x + feed_forward(x)

    def _feed_forward(self, x: Float[Array, "rows length embed"]) -> Float[Array, "rows length embed"]:
        return self.mlp(self.mlp_norm(x))


class Qwen2(nnx.Module):
    """Token ids to hidden states after the final norm. There is no language-model head."""

    def __init__(self, config: PRMConfig, params: Params):
        self.config = config
        self.embedding = nnx.Param(params["embedding"])
        self.layers = DecoderLayer(config, params["layers"])
        self.final_norm = RMSNorm(params["final_norm"], config.backbone.rms_norm_eps)

    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
    ) -> Float[Array, "rows length embed"]:
        """Hidden states in config.dtype.

        Args:
          tokens: ids below vocab_size.
          positions: rotary position of each token, its depth in its tree.
          subtree_end: the visibility rule of :mod:`cfprm_jax.models.attention`.
          constrain: applied to the residual stream before the first and after every layer.
        """
        net = self.config.backbone
        stream = ("rows", "length", "embed")
        cosine, sine = rotary_angles(positions, net.head_dim, net.rope_theta)
        x = constrain(constrain.embed(self.embedding[...], tokens, self.config.dtype), stream)
        graphdef, stacked = nnx.split(self.layers)

        def one_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            layer = nnx.merge(graphdef, params)
            return constrain(layer(x, cosine, sine, subtree_end, constrain), stream), None

        if self.config.remat == "layer":
            # Inside scan the recomputation cannot be merged with the forward pass, so nothing needs to prevent it.
            one_layer = jax.checkpoint(one_layer, prevent_cse=False)
        x, _ = jax.lax.scan(one_layer, x, stacked)
        return self.final_norm(x)
