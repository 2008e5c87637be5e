"""Comparisons of answers that are stopped when they take too long: a process a thread, killed and replaced.

The limit is of processor time, so that a verdict does not depend on what else the machine does; a process that waits
instead of computing is killed by the clock.

pebble's pool of processes would replace part of this only. It limits wall-clock time alone, so the limits of processor
time and memory and the audit hook would remain; and its workers start by multiprocessing, which imports the program's
main module again or forks a process that has JAX's threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time

import cfprm_jax
from cfprm_jax.errors import UserError

_START_SECONDS = 120.0
# Between the limit of processor time and the one by the clock: other programs may need the processor too.
_PATIENCE = 6.0
_COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[1]); from cfprm_jax.grading.worker import main; "
    "main(sys.argv[2], float(sys.argv[3]))"
)


@dataclasses.dataclass(frozen=True)
class Stopped:
    """A comparison without a verdict.

    Attributes:
      predicted: the one answer.
      reference: the other, or the reference answer.
      reason: "time limit", or what the grader failed with.
    """

    predicted: str
    reference: str
    reason: str


class Comparer:
    """Compares pairs of answers by a grader's rules, each in a process of the calling thread. Close it at the end.

    Attributes:
      stopped: the comparisons without a verdict, in the order they were stopped.
    """

    def __init__(self, grader: str, seconds: float) -> None:
        """No process is started before the first pair.

        Args:
          grader: one of the grading worker's RULES.
          seconds: processor time that a pair may take.
        """
        self._arguments = (grader, str(seconds))
        self._patience = _PATIENCE * seconds
        self._own = threading.local()
        self._lock = threading.Lock()
        self._closed = False
        self._workers: list[_Worker] = []
        self.stopped: list[Stopped] = []

    def equal(self, predicted: str, reference: str) -> bool | None:
        """Whether the predicted answer is correct; None without a verdict, which is recorded in stopped."""
        worker = getattr(self._own, "worker", None)
        if worker is None or not worker.alive:
            worker = self._own.worker = self._started()
        verdict = worker.compare([predicted, reference], self._patience)
        if isinstance(verdict, bool):
            return verdict
        with self._lock:
            self.stopped.append(Stopped(predicted, reference, verdict))
        return None

    def _started(self) -> _Worker:
        """A new process, unless there is to be none any more."""
        worker = None if self._closed else _Worker(self._arguments)
        with self._lock:
            if worker is not None and not self._closed:
                self._workers.append(worker)
                return worker
        if worker is not None:
            worker.end()
        raise RuntimeError("no more comparisons: this was closed")

    def close(self) -> None:
        """End the processes; what is still being compared fails."""
        with self._lock:
            self._closed = True
        for worker in self._workers:
            worker.end()


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, arguments: tuple[str, str]) -> None:
        root = str(pathlib.Path(cfprm_jax.__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, root, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the command, which then ends this
        )
        self._read = b""
        if self._line(_START_SECONDS) != b"ready":
            self._process.kill()
            _, error = self._process.communicate()
            last = error.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"--grader={arguments[0]}: its process does not start: {last[0]}")
        # A full pipe would stop the process.
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while self._process.stderr.read(65536):
                pass

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def compare(self, pair: list[str], seconds: float) -> bool | str:
        """The verdict, or why there is none; without one the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "its process ended"
        reply = self._line(seconds)
        if reply is not None:
            return json.loads(reply)
        self.end()
        return "time limit"

    def _line(self, seconds: float) -> bytes | None:
        """The next line it writes; None if it ends, or does not write one in time."""
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(end - time.monotonic(), 0))
            received = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not received:
                return None
            self._read += received
        line, _, self._read = self._read.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
