"""The parts of a run from its options: network, batches, compiled steps, and the state before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import transformers
from jax.sharding import Mesh

from cfprm_jax.checkpoints import adapters
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.model_directory.tokenizer_files import marker_origin
from cfprm_jax.models.lora import Lora
from cfprm_jax.run import assembly, inputs, summary
from cfprm_jax.run.data import DataSplits, open_splits
from cfprm_jax.run.inputs import LogLine, Network, Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.training import initial_state, program
from cfprm_jax.training.program import Program
from cfprm_jax.training.step import TrainState


class Adapted(NamedTuple):
    """What a run with adapters has besides."""

    lora: Lora
    base: adapters.Base
    record: dict[str, Any]  # for prm.json


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A run before its first step.

    Attributes:
      sources: the files behind the options.
      network: the PRM, without weights.
      tokenizer: with the marker.
      data: training and held-out batches.
      num_steps: optimizer steps, --max_steps considered.
      program: the compiled steps; of a run with adapters they hold the frozen parameters.
      adapted: adapters and their backbone; None trains the whole network.
    """

    config: TrainConfig
    sources: Sources
    network: Network
    tokenizer: transformers.PreTrainedTokenizerBase
    data: DataSplits
    num_steps: int
    program: Program
    adapted: Adapted | None

    def create_state(self) -> tuple[TrainState, str]:
        """The state before the first step, made now, and a phrase for the log that names the source of the weights."""
        adapted = None if self.adapted is None else (self.adapted.lora, self.adapted.base)
        return initial_state.create(self.program, self.sources.model, self.sources.init, self.config.run.seed, adapted)


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
    weights = "float32" if network.adapters is None else config.model.dtype
    log(f"model       {summary.model(network.config, str(sources.model), weights)}")
    tokenizer = load_tokenizer(sources.model, config.encoding.marker, network.config.backbone.vocab_size)
    reserved = marker_origin(tokenizer)
    if reserved is not None:
        log(f"marker      the reserved token {reserved} is renamed to {config.encoding.marker}")
    with turns():
        data = open_splits(config, sources, tokenizer, mesh, log=log)
    num_steps = min(data.loader.num_steps, config.run.max_steps or data.loader.num_steps)
    log(f"steps       {summary.steps(num_steps, data.loader, config.granularity, config.packing, config.loss)}")
    built = assembly.build_program(config, network.config, num_steps, mesh, build=build)
    adapted = None
    if network.adapters is not None:
        adapted = _adapted(config, network.adapters, network, sources, mesh)
        built = built.bind(adapted.base.frozen)
        log(f"adapters    {adapters.describe(network.config, network.adapters, config.model.dtype)}")
    return Setup(config, sources, network, tokenizer, data, num_steps, built, adapted)


def _adapted(config: TrainConfig, lora: Lora, network: Network, sources: Sources, mesh: Mesh) -> Adapted:
    """Adapters with the frozen parameters of their backbone, which are loaded here."""
    dtype, key = config.model.dtype, jax.random.key(config.run.seed)
    record = adapters.record(lora, sources.model, dtype)
    base = adapters.load_base(sources.model, network.config, dtype, mesh, key)
    return Adapted(lora, base, record)
