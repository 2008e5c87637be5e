"""Options of the plan command."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.options import Options, option
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.run.options import TrainConfig


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """Plan."""

    accelerator: str = option("h100-80gb", "Device that the step is compiled for.", choices=tuple(ACCELERATORS))
    num_devices: int = option(1, "Number of devices; a v5p-8 has 4 chips.", lower=1, upper=4096)
    rows: int = option(
        0,
        "Rows of a batch over all devices. 0: for packed rows, as many rows of the longest shape of a run as hold "
        "--batch_size solutions of a third of --max_length, or --batch_tokens; otherwise --batch_size.",
        lower=0,
        upper=1 << 16,
    )
    hbm_reserve: float = option(
        -1.0,
        "Reserved memory in GiB that the step may not use; -1 is 4 for a GPU (CUDA, cuDNN, NCCL) and 0.25 for a TPU.",
        lower=0.0,
        upper=1000.0,
        also=-1.0,
    )
    model_config: str = option(
        "", "config.json of the backbone, if --model is neither a directory nor the name of a known published model."
    )
    suggest: int = option(
        2,
        "Most changes of flags to suggest where the step does not fit; each is compiled.",
        lower=0,
        upper=100,
    )
    output: str = option("", "JSON file with all figures.")


@dataclasses.dataclass(frozen=True)
class PlanConfig(Options):
    """Compile the train step for an accelerator that need not be present, and report whether it fits.

    python -m cfprm_jax.plan --flagfile=configs/paper/math_q_ranking_c2.flags --accelerator=h100-80gb --num_devices=1

    Takes every flag of train; reads no weights and no data, and downloads nothing: --model is a directory, or the name
    of a published Qwen2.5, Qwen3, Llama 3 or Mistral 7B, whose shape is known. Memory, kernels and collectives are the
    XLA compiler's own figures. Exits with 0 if it fits and with 1 if it does not, naming changes that would.
    """

    MAIN_FLAGS: ClassVar = (
        *("accelerator", "num_devices", "model", "model_config", "batch_size"),
        *("max_length", "optimizer", "accumulation", "remat", "mesh"),
    )

    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
