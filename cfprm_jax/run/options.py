"""All options of a training run."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import (
    DeviceConfig,
    DistributedConfig,
    EncodingConfig,
    EvalConfig,
    FrozenConfig,
    GranularityConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ReadConfig,
    RunConfig,
)
from cfprm_jax.options import Options, option

SYNTHETIC = "synthetic"


@dataclasses.dataclass(frozen=True)
class TrainConfig(Options):
    """Train a process reward model on labelled solutions, coarse to fine.

    python -m cfprm_jax.train --model=DIRECTORY --train_data=FILES --c_max=2 --output_dir=RUN

    Writes checkpoints, metrics.jsonl, TensorBoard events and the resolved flags into --output_dir. On SIGTERM or Ctrl-C
    a checkpoint is saved. --resume=auto resumes from the newest checkpoint, with the same result as an uninterrupted
    run.
    """

    MAIN_FLAGS: ClassVar = (
        *("model", "train_data", "output_dir", "loss", "c_max"),
        *("learning_rate", "batch_size", "max_length", "optimizer", "resume"),
    )

    train_data: tuple[str, ...] = option(
        (SYNTHETIC,),
        "Training corpora: files or globs, comma-separated; synthetic generates arithmetic problems.",
        kind="list",
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    frozen: FrozenConfig = dataclasses.field(default_factory=FrozenConfig)
    granularity: GranularityConfig = dataclasses.field(default_factory=GranularityConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    given: frozenset[str] = frozenset()  # names of the flags that were set
