"""Out of device memory, reported in one line: the shape that did not fit, and which flags to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from cfprm_jax.config import ModelConfig, OptimizerConfig, PackingConfig
from cfprm_jax.errors import UserError

# XLA's status on CPUs, GPUs and TPUs alike: in compilation, in allocation, or when a result is read.
_STATUS = "RESOURCE_EXHAUSTED"
_SPLIT = "--mesh=data=1,fsdp=-1,tensor=1"


class Watch:
    """Records the rows that were dispatched last, and converts XLA's error into a UserError about them.

    Dispatch is asynchronous, so a step's error may only be raised where its result is read.
    """

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, packing: PackingConfig):
        """Take the options that the advice depends on: flags that already save the most are not advised."""
        self._model, self._optimizer, self._packing = model, optimizer, packing
        self._dispatched = "the weights and the optimizer's state"

    def watched(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Wrap function(state or params, batch, ...) so that its dispatch is recorded as `what`: "a training step"."""

        def call(first: Any, batch: Any, *rest: Any) -> Any:
            rows, length = batch.tokens.shape
            self._dispatched = f"{what} on {rows} {'row' if rows == 1 else 'rows'} of {length:,} tokens"
            return function(first, batch, *rest)

        return call

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise a UserError in place of XLA's error inside the with block."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if _STATUS not in str(error):
                raise
            raise UserError(
                f"out of device memory: {self._dispatched} did not fit ({_reason(str(error))}). "
                f"Choose {self._advice()}; "
                "python -m cfprm_jax.plan, with the flags of the run, --rows and --row_length, computes what fits"
            ) from error

    def _advice(self) -> str:
        model, optimizer, packing = self._model, self._optimizer, self._packing
        less = []
        if model.remat != "layer":
            less.append("--remat=layer")
        if optimizer.optimizer != "adamw_compact" and model.dtype == "bfloat16":
            less.append("--optimizer=adamw_compact")
        length = f"{packing.row_length}" if packing.row_length else "fitted to the data"
        less += [
            f"a larger --accumulation than {optimizer.accumulation}",
            f"a smaller --batch_tokens than {packing.batch_tokens}"
            if packing.batch_tokens
            else f"a smaller --batch_size than {packing.batch_size}",
            f"a shorter --row_length ({length})",
            f"or more devices with {_SPLIT}",
        ]
        return ", ".join(less)


def _reason(text: str) -> str:
    """The sentence of XLA's message that has the size in it, without what follows on other lines."""
    first = text[text.find(_STATUS) :].removeprefix(_STATUS).lstrip(": ").splitlines()[0]
    return re.split(r"(?<=[a-z])\.\s", first)[0].strip()[:200].rstrip(".")
