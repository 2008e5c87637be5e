"""The reward head: a hidden state to one logit z, in float32 whatever the backbone computes in.

sigmoid(z) at a step's marker is the step's score. bfloat16 has 8 bits: candidates whose scores differ in the third
digit would tie, so weights, products and sums here are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.layers import Linear
from cfprm_jax.models.parameters import Params


class RewardHead(nnx.Module):
    """Linear(hidden -> 1), or Linear(hidden -> hidden), ReLU, Linear(hidden -> 1) for an mlp head.

    With a redundancy output a second Linear(hidden -> 1) reads what the last layer reads.
    """

    def __init__(self, config: PRMConfig, params: Params):
        self.hidden = Linear(params["hidden"]) if config.head == "mlp" else None
        self.output = Linear(params["output"])
        self.redundancy = Linear(params["redundancy"]) if config.redundancy else None

    def __call__(self, x: Float[Array, "rows length embed"]) -> Float[Array, "rows length *outputs"]:
        """z [rows, length], or with a redundancy output [rows, length, 2] of both logits."""
        x = x.astype(jnp.float32)
        if self.hidden is not None:
            x = jax.nn.relu(self.hidden(x))
        if self.redundancy is not None:
            return jnp.concatenate([self.output(x), self.redundancy(x)], axis=-1)
        return self.output(x)[..., 0]
