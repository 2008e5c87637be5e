"""Out of device memory, reported in one line: the shape that did not fit, and which flags to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from cfprm_jax.config import FrozenConfig, LoraConfig, ModelConfig, OptimizerConfig, PackingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import caches

# XLA's status on CPUs, GPUs and TPUs alike: in compilation, in allocation, or when a result is read.
_STATUS = "RESOURCE_EXHAUSTED"
SHARDED = "data=1,fsdp=-1,tensor=1"
"""The mesh that shards all that a run keeps on its devices."""
MORE_DEVICES = f"more devices with --mesh={SHARDED}"


def savings(
    model: ModelConfig, optimizer: OptimizerConfig, lora: LoraConfig, frozen: FrozenConfig, *, unsharded: bool = False
) -> dict[str, str]:
    """Flags that need less memory and leave the training as it is, those that are set left out; the cheapest first.

    Args:
      unsharded: include a mesh that shards the state.
    """
    flags = {}
    if model.remat != "layer":
        flags["remat"] = "layer"
    if unsharded:
        flags["mesh"] = SHARDED
    if frozen.frozen_layers and not frozen.cached:
        flags["cache_frozen"] = caches.AUTO
    if optimizer.optimizer == "adamw" and model.dtype == "bfloat16" and not lora.lora_rank:
        flags["optimizer"] = "adamw_compact"
    return flags


class Watch:
    """Records the rows that were dispatched last, and converts XLA's error into a UserError about them.

    Dispatch is asynchronous, so a step's error may only be raised where its result is read.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        packing: PackingConfig,
        lora: LoraConfig,
        frozen: FrozenConfig,
    ):
        """Take the options that the advice depends on: flags that already save the most are not advised."""
        self._accumulation, self._packing = optimizer.accumulation, packing
        self._savings = savings(model, optimizer, lora, frozen)
        self._dispatched = "the weights and the optimizer's state"

    def watched(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wrap function(state or params, batch, ...) so that its dispatch is recorded as `what`: "a training step"."""

        def call(first: Any, batch: Any, *rest: Any) -> Any:
            rows, length = batch.tokens.shape
            self._dispatched = f"{what} on {rows} {'row' if rows == 1 else 'rows'} of {length:,} tokens"
            return function(first, batch, *rest)

        return call

    @contextlib.contextmanager
    def explained(self, what: str = "", choose: str = "") -> Iterator[None]:
        """Raise a UserError in place of XLA's error inside the with block.

        Args:
          what: is computed there; by default the state before the first step, or what :meth:`watched` has recorded.
          choose: flags that would help, if those of a training step would not.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if _STATUS not in str(error):
                raise
            raise UserError(
                f"out of device memory: {what or self._dispatched} did not fit ({_reason(str(error))}). "
                f"Choose {choose or self._advice()}"
            ) from error

    def _advice(self) -> str:
        packing = self._packing
        length = f"{packing.row_length}" if packing.row_length else "fitted to the data"
        less = [
            *(f"--{name}={value}" for name, value in self._savings.items()),
            f"a larger --accumulation than {self._accumulation}",
            f"a smaller --batch_tokens than {packing.batch_tokens}"
            if packing.batch_tokens
            else f"a smaller --batch_size than {packing.batch_size}",
            f"a shorter --row_length ({length})",
            f"or {MORE_DEVICES}",
        ]
        return (
            f"{', '.join(less)}; "
            "python -m cfprm_jax.plan, with the flags of the run, --rows and --row_length, computes what fits"
        )


def _reason(text: str) -> str:
    """The sentence of XLA's message that has the size in it, without what follows on other lines."""
    first = text[text.find(_STATUS) :].removeprefix(_STATUS).lstrip(": ").splitlines()[0]
    return re.split(r"(?<=[a-z])\.\s", first)[0].strip()[:200].rstrip(".")
