"""The run that bench/profile_step.py looks at: its flags, and program, state and batches as train makes them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from common import write_corpus
from earlier_steps import Earlier
from networks import fresh, small_backbone

from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    GranularityConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    Options,
    PackingConfig,
    ReadConfig,
    option,
)
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import Loader
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.sharding import rules
from cfprm_jax.synthetic.tokenizer import make_tokenizer
from cfprm_jax.training import optimizer, program


@dataclasses.dataclass(frozen=True)
class ShapeOptions(Options):
    """The shape, where --model names no directory."""

    hidden: int = option(512, "Hidden size; heads are 64 wide, the MLP four times this.", lower=64)
    layers: int = option(4, "Layers.", lower=1)
    train_data: tuple[str, ...] = option((), "Corpora; empty makes one.", kind="list")
    platform: str = option("auto", "Device.", choices=("auto", "cpu", "gpu", "tpu"))
    steps: int = option(4, "Steps of the run that are timed.", lower=2)
    rounds: int = option(3, "Turns of every part.", lower=1)
    before: bool = option(False, "The step, too, without each of the things that made it faster.")
    small: bool = option(False, "A narrow model and two rounds.")
    output: str = option("", "JSON file; empty writes none.")


@dataclasses.dataclass(frozen=True)
class ProfileConfig(Options):
    """Profile the train step and the host's part of it."""

    shape: ShapeOptions = dataclasses.field(default_factory=ShapeOptions)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)


class Run:
    """A run like that of the train command, on one device: program, state, and batches."""

    def __init__(self, config: ProfileConfig, devices: list[jax.Device], cache: pathlib.Path) -> None:
        self.config = config
        directory = pathlib.Path(config.model.model)
        named = (directory / "config.json").is_file()
        tokenizer = load_tokenizer(directory, config.encoding.marker) if named else make_tokenizer()
        shape = config.shape
        if named:
            backbone = loading.read_config(directory)[0]
        else:
            backbone = small_backbone(len(tokenizer), shape.hidden, shape.layers)
        self.mesh = rules.make_mesh(DeviceConfig(), devices[:1])
        model = config.model
        backend = rules.attention_backend(model.attention, self.mesh, backbone, model.dtype)
        self.network = PRMConfig(backbone, model.head, model.dtype, backend, model.remat)
        self.built, self.state = fresh(self.network, config.loss, config.optimizer, self.mesh)
        data = list(shape.train_data)
        if not data:
            data = [str(cache / "rows.jsonl")]
            write_corpus(pathlib.Path(data[0]), 40 * config.packing.batch_size, 16)
        corpus = open_corpus(data, ReadConfig(), GranularityConfig(), config.encoding, tokenizer, cache / "corpora")
        self.loader = Loader(
            corpus, GranularityConfig(), config.packing, config.encoding, 0, config.optimizer.accumulation
        )
        whole = max(self.loader.num_steps - 1, 1)
        self.steps = [index * whole // shape.steps for index in range(shape.steps)]

    def build(self, network: PRMConfig) -> program.Program:
        return program.build(network, self.config.loss, self.config.optimizer, 1000, self.mesh)

    def put(self, packed: PackedBatch) -> PackedBatch:
        return rules.put_batch(packed, self.built.batch_shardings)

    def step(self, placed: PackedBatch) -> dict[str, jax.Array]:
        self.state, metrics = self.built.train_step(self.state, placed)
        return metrics

    def step_without(self, earlier: Earlier, placed: PackedBatch) -> Callable[[], dict[str, jax.Array]]:
        """A call that steps as it was before; compiled, as what is patched must be traced."""
        with earlier.in_force():
            built: Any = self.build(earlier.network(self.network))
            compiled = built.train_step.lower(self.state, placed).compile()

        def call() -> dict[str, jax.Array]:
            self.state, metrics = compiled(self.state, placed)
            return metrics

        return call

    def xla_costs(self, placed: PackedBatch) -> tuple[float, float]:
        """FLOPs and bytes of the step as XLA counts them, which counts the body of a loop once.

        So the step is compiled with one layer and with two, its loops over layers unrolled, and the difference counted
        as often as there are layers. Loops of attention are counted once whatever they do.
        """
        costs = []
        unrolled = functools.partial(jax.lax.scan, unroll=True)
        with mock.patch.object(jax.lax, "scan", unrolled), mock.patch.object(optimizer, "_LARGE_LAYER", sys.maxsize):
            for layers in (1, 2):
                backbone = dataclasses.replace(self.network.backbone, num_hidden_layers=layers)
                built: Any = self.build(dataclasses.replace(self.network, backbone=backbone))
                found = built.train_step.lower(built.abstract_state(), placed).compile().cost_analysis()
                costs.append(np.array([found["flops"], found["bytes accessed"]]))
        flops, moved = costs[0] + (self.network.backbone.num_hidden_layers - 1) * (costs[1] - costs[0])
        return float(flops), float(moved)
