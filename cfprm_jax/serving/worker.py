"""The thread that owns the scorer, and with it the device."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float32

from cfprm_jax.inference.prefix_rows import Tokens
from cfprm_jax.runtime import process
from cfprm_jax.serving.batching import BatchPolicy, Job, JobQueue
from cfprm_jax.serving.errors import RequestError


class SequenceScorer(Protocol):
    """What the worker needs of :class:`~cfprm_jax.inference.prefix_scorer.PrefixScorer`."""

    def outputs(self, sequences: Sequence[Tokens]) -> list[Float32[np.ndarray, "steps outputs"]]:
        """The head's outputs at the positions of every sequence."""

    def clear(self) -> None:
        """Forget what is cached."""


class Worker:
    """Scores jobs, batch by batch, in a thread of its own.

    Attributes:
      failure: the last error of the device, in words; the server's health is red from then on.
      batches: how many were computed.
    """

    def __init__(self, scorer: SequenceScorer, policy: BatchPolicy) -> None:
        self._scorer, self._queue = scorer, JobQueue(policy)
        self.failure: str | None = None
        self.batches = 0
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._thread.start()

    def submit(self, sequences: Sequence[Tokens]) -> Job:
        """Have sequences scored."""
        return self._queue.put(sequences)

    def close(self, seconds: float | None = None) -> None:
        """Finish what is waiting, and end; a device that does not answer is not waited for longer than that."""
        self._queue.close()
        self._thread.join(seconds)

    def _run(self) -> None:
        while jobs := self._queue.take():
            try:
                outputs = iter(self._scorer.outputs([sequence for job in jobs for sequence in job.sequences]))
                found = [[next(outputs) for _ in job.sequences] for job in jobs]
            except Exception as error:
                self._fail(jobs, error)
                continue
            self.batches += 1
            for job, own in zip(jobs, found, strict=True):
                if all(np.isfinite(output).all() for output in own):
                    job.future.set_result(own)
                else:
                    job.future.set_exception(RequestError(500, "the model gives a score that is not finite"))

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Every job of the batch gets an error; the log gets the traceback, and clients do not."""
        self.failure = f"{type(error).__name__}: {str(error)[:300]}"
        for line in traceback.format_exception(error):
            process.write_line(line.rstrip("\n"))
        try:
            self._scorer.clear()  # a pool that was being written may be lost
        except Exception as again:
            process.write_line(f"the cache could not be emptied: {again}")
        for job in jobs:
            job.future.set_exception(RequestError(500, "the scorer failed; the server's log has the reason"))
