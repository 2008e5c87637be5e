"""The process reward model: a backbone, a reward head, and the one forward pass that training and scoring use."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from cfprm_jax.models.backbone import Backbone, Trunk
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.placement import Placement, unconstrained
from cfprm_jax.models.reward_head import RewardHead


class PRMNetwork(nnx.Module):
    """A process reward model over given parameters (see :mod:`cfprm_jax.models.parameters`)."""

    def __init__(self, config: PRMConfig, params: Params):
        self.backbone = Backbone(config, params["backbone"], params.get("trunk"))
        self.head = RewardHead(config, params["head"])

    def __call__(
        self,
        tokens: Int[Array, "rows length"],
        positions: Int[Array, "rows length"],
        subtree_end: Int[Array, "rows length"],
        constrain: Placement = unconstrained,
        hidden: Float[Array, "rows length embed"] | None = None,
    ) -> Float[Array, "rows length *outputs"]:
        """The head's output z at every token, float32; with a redundancy output both logits in a last axis."""
        return self.head(self.backbone(tokens, positions, subtree_end, constrain, hidden))


def apply(
    config: PRMConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    subtree_end: Int[Array, "rows length"],
    *,
    constrain: Placement = unconstrained,
    hidden: Float[Array, "rows length embed"] | None = None,
) -> Float[Array, "rows length *outputs"]:
    """The head's output z at every token of packed rows, float32; a pure function of its arguments.

    Of a network with a redundancy output there is a last axis of two: z, and the logit of redundancy.

    A step's logit is z at its marker. config and constrain are static under jax.jit.

    Args:
      params: nested dict of the structure of param_specs(config), or of one with its lowest layers apart
        (:mod:`.partition`); float32 or bfloat16, computed in config.dtype.
      tokens: ids below vocab_size; padding has any.
      positions: depth of each token in its tree, the rotary position.
      subtree_end: token i sees token j iff j <= i < subtree_end[j]; i + 1 for padding.
      constrain: sharding constraints of activations by logical axes (see Placement); none by default.
      hidden: the residual stream after the lowest layers (:func:`trunk`); then params are those above them alone.
    """
    return PRMNetwork(config, params)(tokens, positions, subtree_end, constrain, hidden)


def trunk(
    config: PRMConfig,
    params: Params,
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    subtree_end: Int[Array, "rows length"],
    *,
    constrain: Placement = unconstrained,
) -> Float[Array, "rows length embed"]:
    """The residual stream after the lowest layers, in config.dtype; other arguments as of :func:`apply`.

    Args:
      params: {"embedding", "layers"}, of those layers.
    """
    return Trunk(config, params)(tokens, positions, subtree_end, constrain)
