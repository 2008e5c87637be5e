"""The run that bench/profile_step.py profiles: its flags, and program, state and batches of train."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
from common import write_corpus

from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    RunConfig,
)
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.options import Options, option
from cfprm_jax.run import assembly, inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import setup
from cfprm_jax.sharding import rules
from cfprm_jax.synthetic.model import make_config
from cfprm_jax.synthetic.tokenizer import make_tokenizer
from cfprm_jax.training import optimizer


@dataclasses.dataclass(frozen=True)
class ShapeOptions(Options):
    """The shape, where --model names no directory."""

    hidden: int = option(512, "Hidden size; heads are 64 wide, the MLP four times this.", lower=64)
    layers: int = option(4, "Layers.", lower=1)
    train_data: tuple[str, ...] = option((), "Corpora; empty makes one.", kind="list")
    platform: str = option("auto", "Device.", choices=("auto", "cpu", "gpu", "tpu"))
    steps: int = option(4, "Steps of the run that are timed.", lower=2)
    rounds: int = option(3, "Turns of every part.", lower=1)
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
    """A run of the train command on one device: program, state, and batches."""

    def __init__(self, config: ProfileConfig, devices: list[jax.Device], cache: pathlib.Path) -> None:
        self.config, shape = config, config.shape
        model = config.model
        if not (pathlib.Path(model.model) / "config.json").is_file():
            model = dataclasses.replace(model, model=str(write_model(cache / "model", shape.hidden, shape.layers)))
        data = shape.train_data
        if not data:
            data = (str(cache / "rows.jsonl"),)
            write_corpus(pathlib.Path(data[0]), 40 * config.packing.batch_size, 16)
        self.options = TrainConfig(
            train_data=data,
            model=dataclasses.replace(model, init="random"),
            loss=config.loss,
            optimizer=config.optimizer,
            packing=config.packing,
            encoding=config.encoding,
            eval=EvalConfig(eval_fraction=0.0),
            run=RunConfig(data_cache_dir=str(cache / "corpora")),
        )
        self.mesh = rules.make_mesh(DeviceConfig(), devices[:1])
        made = setup(self.options, self.mesh, inputs.materialise(self.options, cache))
        self.built, self.network, self.loader = made.program, made.network.config, made.data.loader
        self.state, _ = made.create_state()
        whole = max(self.loader.num_steps - 1, 1)
        self.steps = [index * whole // shape.steps for index in range(shape.steps)]

    def put(self, packed: PackedBatch) -> PackedBatch:
        return rules.put_batch(packed, self.built.batch_shardings)

    def step(self, placed: PackedBatch) -> dict[str, jax.Array]:
        self.state, metrics = self.built.train_step(self.state, placed)
        return metrics

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
                network = dataclasses.replace(self.network, backbone=backbone)
                built: Any = assembly.build_program(self.options, network, 1000, self.mesh)
                found = built.train_step.lower(built.abstract_state(), placed).compile().cost_analysis()
                costs.append(np.array([found["flops"], found["bytes accessed"]]))
        flops, moved = costs[0] + (self.network.backbone.num_hidden_layers - 1) * (costs[1] - costs[0])
        return float(flops), float(moved)


def write_model(directory: pathlib.Path, hidden: int, layers: int) -> pathlib.Path:
    """A Hugging Face directory without weights: the quickstart's tokenizer, and a network of this shape."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    heads = hidden // 64
    raw = make_config(-(-len(tokenizer) // 128) * 128) | {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, 1),
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    (directory / "config.json").write_text(json.dumps(raw))
    return directory
