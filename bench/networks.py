"""Small networks with random weights, for benches that measure steps of a shape and not of a checkpoint."""

from __future__ import annotations

import functools

import jax

from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.models import parameters
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.training import program, step


def small_backbone(vocab_size: int, width: int, layers: int) -> BackboneConfig:
    """Heads are 64 wide, half as many of keys and values; the MLP is four times the width; rows in whole 128s."""
    heads = width // 64
    return BackboneConfig(-(-vocab_size // 128) * 128, width, 4 * width, layers, heads, max(heads // 2, 1), 64)


def fresh(
    network: PRMConfig, loss: LossConfig, options: OptimizerConfig, mesh: jax.sharding.Mesh, seed: int = 0
) -> tuple[program.Program, step.TrainState]:
    """The train step as the train command puts it together, and its first state."""
    built = program.build(network, loss, options, 1000, mesh)
    make = jax.jit(functools.partial(parameters.init_params, network), out_shardings=built.param_shardings)
    return built, built.init_state(make(jax.random.key(seed)))
