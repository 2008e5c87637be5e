"""The layer of the decoder as Flax NNX modules over given parameters: the one that trains, scores and samples.

A module takes the nested dict of its parameters (see :mod:`cfprm_jax.models.parameters`) and holds them as nnx.Param.
A projection has a bias if the parameters contain one.
Weights are cast to the compute dtype where they are used: float32 masters need no bfloat16 copy of the whole model.

`axis` is the axis of the features: -1 for [rows, length, features] in training and scoring; 0 for [features, rows],
one token a row, in :mod:`cfprm_jax.inference.decoder`. Queries, keys and values are [rows, length, heads, head_dim] in
both (rows is 1 there, and length the number of rows).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.products import times, times_columns
from cfprm_jax.models.rotary import rotate

LAST, FIRST = -1, 0
"""The two places of the feature axis."""

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention: rotated queries, rotated keys, and values, to mixed values of the queries' shape."""


class Linear(nnx.Module):
    """W x + b in the dtype of x, for a kernel [out, in] and an optional bias [out].

    With an adapter (:mod:`cfprm_jax.models.lora`), lora_a [rank, in] and lora_b [out, rank], also + B (A x).
    """

    def __init__(self, params: Params, axis: int = LAST):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.lora_a = nnx.Param(params["lora_a"]) if "lora_a" in params else None
        self.lora_b = nnx.Param(params["lora_b"]) if "lora_b" in params else None
        self.axis = axis

    def __call__(self, x: Float[Array, "... into"]) -> Float[Array, "... out"]:
        product = times if self.axis == LAST else times_columns
        y = product(x, self.kernel[...])
        if self.bias is not None:
            y = y + _along(self.bias[...].astype(x.dtype), self.axis)
        if self.lora_a is not None and self.lora_b is not None:
            y = y + product(product(x, self.lora_a[...]), self.lora_b[...])
        return y


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32, returned in the dtype of x."""

    def __init__(self, params: Params, eps: float, axis: int = LAST):
        self.scale = nnx.Param(params["scale"])
        self.eps = eps
        self.axis = axis

    def __call__(self, x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=self.axis, keepdims=True) + self.eps)
        return (normed * _along(self.scale[...].astype(jnp.float32), self.axis)).astype(x.dtype)


def _along(vector: Float[Array, " features"], axis: int) -> jax.Array:
    return vector if axis == LAST else vector[:, None]


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: PRMConfig, params: Params, axis: int = LAST):
        net = config.backbone
        self.head_dim, self.axis = net.head_dim, axis
        self.query, self.key = Linear(params["query"], axis), Linear(params["key"], axis)
        self.value, self.output = Linear(params["value"], axis), Linear(params["output"], axis)
        # Of each head on its own, whose features are last in either layout.
        self.query_norm = RMSNorm(params["query_norm"], net.rms_norm_eps) if net.qk_norm else None
        self.key_norm = RMSNorm(params["key_norm"], net.rms_norm_eps) if net.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        cosine: Float[Array, "rows length half"],
        sine: Float[Array, "rows length half"],
        mix: Mix,
    ) -> Float[Array, "rows length embed"]:
        q, k, v = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        mixed = mix(rotate(q, cosine, sine), rotate(k, cosine, sine), v)
        rows, length = mixed.shape[:2]
        return self.output(mixed.reshape(rows, length, -1) if self.axis == LAST else mixed.reshape(length, -1).T)

    def _heads(self, x: jax.Array) -> Float[Array, "rows length heads head_dim"]:
        x = x if self.axis == LAST else x.T[None]
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, params: Params, axis: int = LAST):
        self.gate, self.up, self.down = (Linear(params[name], axis) for name in ("gate", "up", "down"))

    def __call__(self, x: Float[Array, "rows length embed"]) -> Float[Array, "rows length embed"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: PRMConfig, params: Params, axis: int = LAST):
        eps = config.backbone.rms_norm_eps
        self.attention_norm = RMSNorm(params["attention_norm"], eps, axis)
        self.attention = SelfAttention(config, params["attention"], axis)
        self.mlp_norm = RMSNorm(params["mlp_norm"], eps, axis)
        self.mlp = MLP(params["mlp"], axis)
        self.remat_mlp = config.remat == "mlp"

    def __call__(
        self,
        x: Float[Array, "rows length embed"],
        cosine: Float[Array, "rows length half"],
        sine: Float[Array, "rows length half"],
        mix: Mix,
    ) -> Float[Array, "rows length embed"]:
        """The layer's output, in the shape and dtype of x.

        Args:
          cosine, sine: of :func:`cfprm_jax.models.rotary.rotary_angles`.
          mix: the attention over the visible keys and values.
        """
        x = x + self.attention(self.attention_norm(x), cosine, sine, mix)
        feed_forward = self._feed_forward
        if self.remat_mlp:
            # Inside scan the recomputation cannot be merged with the forward pass, so nothing needs to prevent it.
            feed_forward = jax.checkpoint(feed_forward, prevent_cse=False)
        return x + feed_forward(x)

    def _feed_forward(self, x: Float[Array, "rows length embed"]) -> Float[Array, "rows length embed"]:
        return self.mlp(self.mlp_norm(x))
