"""Network and compiled steps of a run, from its options and the shape of its backbone. Reads no file.

:func:`cfprm_jax.run.setup.setup` adds tokenizer, data and weights. What has none of these builds the same network and
program here: `plan`, which compiles for absent devices, and benches on random weights. Imports neither tokenizers nor
the readers of data.
"""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from cfprm_jax.models import lora
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.partition import Partition
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.sharding import rules
from cfprm_jax.training import program
from cfprm_jax.training.program import Program


def define_network(config: TrainConfig, backbone: BackboneConfig, mesh: Mesh) -> PRMConfig:
    """The PRM of a run, with the attention backend that its devices have.

    Raises:
      UserError: the backbone has fewer positions than --max_length, or the backend cannot be used on the devices.
    """
    backbone.check_length(config.encoding.max_length)
    model = config.model
    attention = rules.attention_backend(model.attention, mesh, backbone, model.dtype)
    return PRMConfig(backbone, model.head, model.dtype, attention, model.remat, config.loss.redundancy)


def partition_of(config: TrainConfig, network: PRMConfig) -> Partition:
    """What of the network a run trains.

    Raises:
      UserError: more layers are frozen than there are, or none is left for adapters.
    """
    adapters = lora.parse(config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_targets)
    return Partition(network, config.frozen.frozen_layers, adapters, config.frozen.cached)


def build_program(
    config: TrainConfig,
    network: PRMConfig,
    num_steps: int,
    mesh: Mesh,
    *,
    build: Callable[..., Program] = program.build,
) -> Program:
    """The compiled steps of a run of num_steps optimizer steps.

    Args:
      build: :func:`cfprm_jax.training.program.build`, or a cached one.

    Raises:
      UserError: the mesh does not divide a parameter's dimension, or options that exclude each other.
    """
    partition = partition_of(config, network)
    return build(
        network,
        config.loss,
        config.optimizer,
        num_steps,
        mesh,
        adapters=partition.lora,
        deterministic=config.model.deterministic,
        frozen_layers=partition.frozen_layers,
        cached=partition.cached,
    )
