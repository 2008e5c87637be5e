"""The parts of a run from its options: network, batches, compiled steps, and the state before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import transformers
from jax.sharding import Mesh

from cfprm_jax.checkpoints import frozen
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.model_directory.tokenizer_files import marker_origin
from cfprm_jax.run import assembly, inputs, summary, trunk
from cfprm_jax.run.data import DataSplits, open_splits
from cfprm_jax.run.inputs import LogLine, Network, Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.training import initial_state, program
from cfprm_jax.training.program import Program
from cfprm_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A run before its first step.

    Attributes:
      sources: the files behind the options.
      network: the PRM, without weights.
      tokenizer: with the marker.
      data: training and held-out batches.
      num_steps: optimizer steps, --max_steps considered.
      program: the compiled steps, with the frozen parameters.
      frozen: for prm.json, what is frozen and where its weights are; empty where everything is trained.
    """

    config: TrainConfig
    sources: Sources
    network: Network
    tokenizer: transformers.PreTrainedTokenizerBase
    data: DataSplits
    num_steps: int
    program: Program
    frozen: dict[str, Any]

    def create_state(self) -> tuple[TrainState, str]:
        """The state before the first step, made now, and a phrase for the log that names the source of the weights."""
        return initial_state.create(self.program, self.sources.model, self.sources.init, self.config.run.seed)


def setup(
    config: TrainConfig,
    mesh: Mesh,
    sources: Sources,
    *,
    log: LogLine = lambda _: None,
    turns: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    build: Callable[..., Program] = program.build,
) -> Setup:
    """Everything of a run but its state.

    Args:
      log: takes the lines of the log.
      turns: around what writes caches, so that one process does so and the others find them.
      build: :func:`cfprm_jax.training.program.build`, or one that keeps programs.

    Raises:
      UserError: files that do not fit the options, or a mesh that does not divide the network.
    """
    network = inputs.open_network(config, sources, mesh)
    partition = network.partition
    weights = "float32" if partition.lora is None else config.model.dtype
    log(f"model       {summary.model(network.config, str(sources.model), weights)}")
    tokenizer = load_tokenizer(sources.model, config.encoding.marker, network.config.backbone.vocab_size)
    reserved = marker_origin(tokenizer)
    if reserved is not None:
        log(f"marker      the reserved token {reserved} is renamed to {config.encoding.marker}")
    with turns():
        hidden = trunk.open_hidden(config, sources, partition, tokenizer=tokenizer, mesh=mesh, log=log)
        data = open_splits(config, sources, tokenizer, mesh, log=log, hidden=hidden)
    if hidden is not None:
        hidden.free()
    num_steps = min(data.loader.num_steps, config.run.max_steps or data.loader.num_steps)
    log(f"steps       {summary.steps(num_steps, data.loader, config.granularity, config.packing, config.loss)}")
    notes = (
        summary.little_movement(config.optimizer, num_steps),
        summary.repeated_labels(data.report, config.packing, config.loss),
    )
    for note in filter(None, notes):
        log(f"note        {note}")
    built = assembly.build_program(config, network.config, num_steps, mesh, build=build)
    record = frozen.record(partition, sources.model, config.model.dtype)
    if record:
        built = built.bind(frozen.load(network.config, partition.frozen, sources.model, config.model.dtype, mesh))
        log(f"{'frozen' if partition.lora is None else 'adapters':<12}{frozen.describe(partition, config.model.dtype)}")
    return Setup(config, sources, network, tokenizer, data, num_steps, built, record)
