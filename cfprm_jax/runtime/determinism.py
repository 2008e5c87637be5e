"""Determinism: the options of XLA, cuDNN and NCCL with which a step gives the same bits every time on NVIDIA GPUs.

On CPUs and TPUs a compiled program always does. On a GPU, left to themselves, XLA adds up a scatter by atomics and
takes whichever kernel was fastest when it compiled, cuDNN does the same in the backward pass of attention, and NCCL may
let the switches of NVLink add, in no fixed order (https://github.com/NVIDIA/nccl/issues/1497).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from cfprm_jax.errors import UserError

_GPUS = ("gpu", "cuda")
_SWITCHES = "NCCL_NVLS_ENABLE"


def compiler_options(deterministic: bool, platform: str) -> dict[str, Any]:
    """The compiler options of a run's programs, for jax.jit(compiler_options=...).

    The first option orders all sums, cuDNN's too, and takes every kernel by rule instead of by measuring. Without the
    second a scatter becomes a loop with a turn for every token.

    Args:
      platform: of the devices that it is compiled for.
    """
    if not deterministic or platform not in _GPUS:
        return {}
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_scatter_determinism_expander": True}


def fix_collectives(environment: MutableMapping[str, str]) -> None:
    """Have NCCL leave the switches of NVLink alone; for before the first program that runs on several GPUs.

    Args:
      environment: of this process.

    Raises:
      UserError: the environment enables them.
    """
    if environment.setdefault(_SWITCHES, "0") != "0":
        raise UserError(
            f"--deterministic: {_SWITCHES}={environment[_SWITCHES]} allows sums in no fixed order; unset it"
        )
