"""All options of `train` and of `export`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import (
    CHECKPOINT_HELP,
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
from cfprm_jax.options import Options, option, refuse_unused

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


@dataclasses.dataclass(frozen=True)
class ExportConfig(Options):
    """Export a trained PRM as a Hugging Face directory, with tokenizer and model card.

    python -m cfprm_jax.export --checkpoint=RUN --format=process_reward_model --output_dir=DIRECTORY

    Reads the newest checkpoint of a run of train, or the given one. Adapters are merged into their backbone, except
    with --format=peft_adapter. Runs in a single process, also for distributed runs.
    """

    checkpoint: str = option("", CHECKPOINT_HELP)
    format: str = option(
        "token_classification",
        "Format of the directory. token_classification: transformers' class for the backbone, such as "
        "LlamaForTokenClassification; for a linear head. process_reward_model, reward_model: the classes of "
        "Qwen2.5-Math-PRM and Qwen2.5-Math-RM, served by vLLM; for any head on Qwen2. peft_adapter: the adapters of a "
        "run with --lora_rank; for a linear head.",
        choices=("token_classification", "process_reward_model", "reward_model", "peft_adapter"),
    )
    output_dir: str = option("", "Directory to write; must be new or empty.")
    dtype: str = option("bfloat16", "Dtype of the exported weights.", choices=("bfloat16", "float32"))
    drop_redundancy: bool = option(
        False, "Drop the redundancy output, for formats that do not support it. Scores do not change."
    )
    base_model: str = option(
        "",
        "Name of the backbone on the hub, ORGANISATION/NAME, for the model card and for PEFT. Empty derives it from "
        "the path of the backbone.",
    )
    push_to_hub: str = option("", "Upload the directory to this repository of the Hugging Face hub, OWNER/NAME.")
    private: bool = option(True, "Create the repository of --push_to_hub as a private one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.push_to_hub:
            refuse_unused(self, ["private"], "exports with --push_to_hub")
