"""The options of gpu_check.py, which its parts read too."""

from __future__ import annotations

import dataclasses

from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class CheckConfig(Options):
    """Check and measure one accelerator."""

    platform: str = option("auto", "Accelerator; auto is JAX's own choice.", choices=("auto", "cpu", "gpu", "tpu"))
    shapes: tuple[str, ...] = option(
        ("7B", "1.5B", "0.5B"), "Qwen2.5 sizes that are measured; tiny makes everything else small too.", kind="list"
    )
    rows: int = option(8, "Rows of a batch.", lower=1)
    length: int = option(2048, "Tokens of a row.", lower=64)
    steps: int = option(8, "Steps that are timed, after two that are not.", lower=1)
    optimizer: str = option("adamw_compact", "Optimizer of the training steps.", choices=("adamw", "adamw_compact"))
    budget: float = option(460.0, "Seconds for everything.", lower=0.0)
    part_limit: float = option(0.0, "Most seconds of a part; 0 is each part's own.", lower=0.0)
    output: str = option("", "JSON file for the figures.")
    part: str = option("", "Run this part alone, in this process and without a limit.")
    deterministic: bool = option(False, "For --part=determinism: compiled as train --deterministic does.")
    scratch: str = option("", "Directory in which parts leave the CPU's results for each other; empty is none.")
