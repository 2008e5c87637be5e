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


class Backbone(nnx.Module):
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
        stream = ("rows", "length", "embed")
        cosine, sine = rotary_angles(positions, self.config.backbone)
        x = constrain(constrain.embed(self.embedding[...], tokens, self.config.dtype), stream)
        graphdef, stacked = nnx.split(self.layers)

        def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attention(q, k, v, subtree_end, self.config.attention, constrain)

        def one_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            layer = nnx.merge(graphdef, params)
            return constrain(layer(x, cosine, sine, mix), stream), None

        if self.config.remat == "layer":
            one_layer = jax.checkpoint(one_layer, prevent_cse=False)  # as in DecoderLayer
        x, _ = jax.lax.scan(one_layer, x, stacked)
        return self.final_norm(x)
