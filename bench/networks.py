"""Small networks with random weights, for benches that measure steps of a shape and not of a checkpoint."""

from __future__ import annotations

import jax

from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.run import assembly
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.training import initial_state
from cfprm_jax.training.program import Program
from cfprm_jax.training.step import TrainState


def small_backbone(vocab_size: int, width: int, layers: int) -> BackboneConfig:
    """Heads are 64 wide, half as many of keys and values; the MLP is four times the width; rows in whole 128s."""
    heads = width // 64
    return BackboneConfig(-(-vocab_size // 128) * 128, width, 4 * width, layers, heads, max(heads // 2, 1), 64)


def build(config: TrainConfig, backbone: BackboneConfig, mesh: jax.sharding.Mesh) -> Program:
    """The program of train for a backbone of this shape."""
    network = assembly.define_network(config, backbone, mesh)
    return assembly.build_program(config, network, 1000, mesh)


def random_state(built: Program, seed: int = 0) -> TrainState:
    """The state of train before its first step, with random weights."""
    return jax.block_until_ready(initial_state.random_program(built)(jax.random.key(seed)))
