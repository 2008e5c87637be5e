"""Batches of requests: closed when they are full, or a few milliseconds after the first request."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence

from cfprm_jax.inference.prefix_rows import Tokens


@dataclasses.dataclass(frozen=True)
class BatchPolicy:
    """When a batch is complete.

    Attributes:
      batch_tokens: tokens that fill it.
      max_wait: seconds after the first request at which it is computed anyway.
    """

    batch_tokens: int
    max_wait: float

    def wait(self, sizes: Iterable[int], waited: float) -> float:
        """Seconds to wait for more; 0 or less is none.

        Args:
          sizes: tokens of each waiting request, at least one.
          waited: seconds since the first came.
        """
        return 0.0 if sum(sizes) >= self.batch_tokens else self.max_wait - waited

    def count(self, sizes: Iterable[int]) -> int:
        """How many of the waiting requests, in their order, make the next batch: at least one."""
        total = count = 0
        for size in sizes:
            total += size
            if count and total > self.batch_tokens:
                break
            count += 1
        return count


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """Sequences of one request, and where their outputs go: a list of arrays [steps, outputs]."""

    sequences: Sequence[Tokens]
    arrived: float
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences)


class JobQueue:
    """Jobs on their way from many requests to one scorer. Thread-safe."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._jobs: collections.deque[Job] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, sequences: Sequence[Tokens]) -> Job:
        """Add a job; cancelling its future removes it.

        Raises:
          RuntimeError: the queue is closed.
        """
        job = Job(sequences, time.monotonic())
        with self._changed:
            if self._closed:
                raise RuntimeError("the queue is closed")
            self._jobs.append(job)
            self._changed.notify_all()
        return job

    def take(self) -> list[Job]:
        """Wait for the next batch; empty when the queue is closed and nothing is left. Cancelled jobs are dropped."""
        with self._changed:
            while True:
                self._jobs = collections.deque(job for job in self._jobs if not job.future.cancelled())
                if not self._jobs:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                sizes = [job.tokens for job in self._jobs]
                wait = self._policy.wait(sizes, time.monotonic() - self._jobs[0].arrived)
                if wait > 0 and not self._closed:
                    self._changed.wait(wait)
                    continue
                batch = [self._jobs.popleft() for _ in range(self._policy.count(sizes))]
                running = [job for job in batch if job.future.set_running_or_notify_cancel()]
                if running:
                    return running

    def close(self) -> None:
        """Take no more jobs; those that wait are still given out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
