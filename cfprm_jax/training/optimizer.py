"""AdamW on float32 masters, its learning rate over the run, and clipping by the global norm.

Parameters are float32; the model casts them to its compute type. At the learning rates of fine-tuning (2e-6) an update
is far below half a unit in the last place of a bfloat16 weight, so bfloat16 parameters would not move at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from cfprm_jax.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The rate of optimizer step k = 0 .. num_steps - 1, exact to the length of the run.

    With W = round(warmup_fraction * num_steps): (k + 1) / W of the peak for k < W, so that already the first step moves
    something; then from the peak at k = W down to final_rate_fraction of it at k = num_steps, along a cosine or a line,
    or not at all (constant).
    """
    warmup = round(config.warmup_fraction * num_steps)
    final = config.final_rate_fraction

    def rate(step: Any) -> Any:
        k = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((k - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
        left = {
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
            "linear": 1.0 - progress,
            "constant": jnp.ones_like(progress),
        }[config.decay]
        decayed = left if config.decay == "constant" else final + (1.0 - final) * left
        return config.learning_rate * jnp.where(k < warmup, (k + 1.0) / max(warmup, 1), decayed)

    return rate


def decay_mask(specs: Any) -> Any:
    """True for what weight decay applies to: matrices, not embeddings, biases and norms."""
    if isinstance(specs, Mapping):
        return {name: decay_mask(spec) for name, spec in specs.items()}
    return specs.kind == "matrix"


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule, specs: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) with decoupled decay of matrices; its gradients come clipped already.

    Args:
      schedule: the learning rate by step.
      specs: descriptions of the parameters, a nested dict of their structure.
    """
    return optax.chain(
        optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask(specs)),
        optax.scale_by_learning_rate(schedule),
    )


def clip(grads: Any, norm: Float[Array, ""], max_norm: float) -> Any:
    """Gradients scaled down to a global norm of max_norm where norm, theirs, is above it; max_norm 0 is off."""
    if not max_norm:
        return grads
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda g: g * scale, grads)
