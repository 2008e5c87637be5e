"""The decoder of all families as a Flax NNX module: embedding, layers, final norm.

The layers are one DecoderLayer whose parameters are stacked on axis 0; nnx.split takes it apart and plain jax.lax.scan
runs it, so compile time does not grow with depth.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention import attention
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.layers import DecoderLayer, RMSNorm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.placement import Placement, unconstrained
from cfprm_jax.models.rotary import rotary_angles

STREAM = ("rows", "length", "embed")
"""Logical axes of the residual stream."""


class Backbone(nnx.Module):
    """Token ids to hidden states after the final norm. There is no language-model head."""

    def __init__(self, config: PRMConfig, params: Params, trunk: Params | None = None):
        """A backbone over its parameters.

        Args:
          params: with a trunk, those above it; {"layers", "final_norm"}, without layers where the trunk has all.
          trunk: {"embedding", "layers"} of the lowest layers where they are frozen; see :mod:`.partition`.
        """
        self.config = config
        self.trunk = None if trunk is None else Trunk(config, trunk)
        if "embedding" in params:
            self.embedding = nnx.Param(params["embedding"])
        self.layers = DecoderLayer(config, params["layers"]) if "layers" in params else None
        self.final_norm = RMSNorm(params["final_norm"], config.backbone.rms_norm_eps)

    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
        hidden: Float[Array, "rows length embed"] | None = None,
    ) -> Float[Array, "rows length embed"]:
        """Hidden states in config.dtype.

        Args:
          tokens: ids below vocab_size.
          positions: rotary position of each token, its depth in its tree.
          subtree_end: the visibility rule of :mod:`cfprm_jax.models.attention`.
          constrain: applied to the residual stream before the first and after every layer.
          hidden: what the trunk gives for these rows, in place of computing it.
        """
        if hidden is not None:
            x = constrain(hidden.astype(self.config.dtype), STREAM)
        elif self.trunk is not None:
            x = jax.lax.stop_gradient(self.trunk(tokens, positions, subtree_end, constrain))
        else:
            x = constrain(constrain.embed(self.embedding[...], tokens, self.config.dtype), STREAM)
        if self.layers is not None:
            x = _through(self.layers, self.config, x, positions, subtree_end, constrain=constrain)
        return self.final_norm(x)


class Trunk(nnx.Module):
    """Token ids to the residual stream after the lowest layers."""

    def __init__(self, config: PRMConfig, params: Params):
        self.config = config
        self.embedding = nnx.Param(params["embedding"])
        self.layers = DecoderLayer(config, params["layers"])

    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
    ) -> Float[Array, "rows length embed"]:
        """Hidden states in config.dtype; arguments as of :class:`Backbone`."""
        x = constrain(constrain.embed(self.embedding[...], tokens, self.config.dtype), STREAM)
        return _through(self.layers, self.config, x, positions, subtree_end, constrain=constrain)


def _through(
    layers: DecoderLayer,
    config: PRMConfig,
    x: Float[Array, "rows length embed"],
    positions: Int[Array, "rows length"],
    subtree_end: Int[Array, "rows length"],
    *,
    constrain: Placement,
) -> Float[Array, "rows length embed"]:
    """The residual stream after stacked layers."""
    cosine, sine = rotary_angles(positions, config.backbone)
    graphdef, stacked = nnx.split(layers)

    def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, subtree_end, config.attention, placement=constrain)

    def one_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        layer = nnx.merge(graphdef, params)
        return constrain(layer(x, cosine, sine, mix), STREAM), None

    if config.remat == "layer":
        one_layer = jax.checkpoint(one_layer, prevent_cse=False)  # as in DecoderLayer
    x, _ = jax.lax.scan(one_layer, x, stacked)
    return x
