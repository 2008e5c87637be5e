"""Metrics and progress of a run: metrics.jsonl on disk, one updating line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TextIO

from cfprm_jax.errors import UserError
from cfprm_jax.run.directory import METRICS
from cfprm_jax.run.loggers import LoggedRun, Loggers
from cfprm_jax.runtime import atomic, disk
from cfprm_jax.runtime.progress import ProgressLine, duration

MEASURED = (
    "steps_per_second",
    "tokens_per_second",
    "expanded_tokens_per_second",
    "model_flops_per_second",
    "mfu",
    "memory_in_use",
    "memory_peak",
)
"""Metrics of a step that depend on clock and machine; the others are equal in every run of the same flags."""

# Latest steps that rates are averaged over: enough to be steady, few enough to follow a change of stage.
_RATE_WINDOW = 20


EVALUATION = "eval_"
"""Prefix of the metrics of an evaluation."""


def read_line(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None for one that is not whole, as a killed run leaves it, or is no line of a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def truncate(path: pathlib.Path, step: int, evaluated: bool = True) -> int:
    """Drop the lines after a step, and those that are not whole; returns the number dropped.

    A resumed run computes those steps again, so that each step is in the file once.

    Args:
      evaluated: False drops the evaluation of the step itself too, which is computed again.
    """
    if not path.exists():
        return 0
    lines, kept = path.read_bytes().splitlines(keepends=True), []
    for line in lines:
        row = read_line(line)
        if row is None:
            continue
        again = not evaluated and row["step"] == step and any(name.startswith(EVALUATION) for name in row)
        if line.endswith(b"\n") and row["step"] <= step and not again:
            kept.append(line)
    if len(kept) < len(lines):
        atomic.write_bytes(path, b"".join(kept))
    return len(lines) - len(kept)


class MetricWriter(Protocol):
    """Where the loop writes its metrics."""

    def write(self, step: int, values: Mapping[str, Any], board: str = "", prefix: str = "") -> None: ...


class NullWriter:
    """Writes nothing: of all processes but the main process."""

    def write(self, step: int, values: Mapping[str, Any], board: str = "", prefix: str = "") -> None:
        """Nothing."""


class MetricLog:
    """metrics.jsonl of a run directory, and the optional loggers beside it."""

    def __init__(
        self, output_dir: pathlib.Path, start_step: int, evaluated: bool = True, *, loggers: Loggers | None = None
    ):
        """Open after start_step (0 for a new run): lines of later steps are dropped.

        Args:
          evaluated: as in :func:`truncate`.
          loggers: closed with the log.
        """
        self._directory = output_dir
        with self._writing():
            output_dir.mkdir(parents=True, exist_ok=True)
            truncate(output_dir / METRICS, start_step, evaluated)
            self._file = (output_dir / METRICS).open("a")
        self._loggers = loggers or Loggers((), LoggedRun(output_dir), lambda line: None)

    def write(self, step: int, values: Mapping[str, Any], board: str = "", prefix: str = "") -> None:
        """Append {"step": step, ...values} to metrics.jsonl, prefix before each name; not finite values are null.

        Args:
          board: group of the loggers, which get the finite numbers as "board/name"; empty logs to metrics.jsonl only.

        Raises:
          UserError: metrics.jsonl cannot be written, because the disk is full or the like.
        """
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self._writing():
            line = {"step": step, **{f"{prefix}{name}": value for name, value in finite.items()}}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if board:
            points = {f"{board}/{name}": v for name, v in finite.items() if isinstance(v, int | float)}
            self._loggers.log(step, points)

    def close(self) -> None:
        """Close the file and the loggers."""
        with contextlib.suppress(OSError):  # write has raised the error already
            self._file.close()
        self._loggers.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"cannot write metrics into {self._directory}: {disk.reason(error)}") from error


class Progress:
    """Progress of a run: step, rates, and time left."""

    def __init__(
        self,
        stream: TextIO,
        start_step: int,
        num_steps: int,
        log_every: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        peak_flops: float | None = None,
    ):
        """Begin after start_step of num_steps.

        Args:
          log_every: steps between lines where the stream is no terminal.
          peak_flops: of all devices together, a second; None if it is not known, and then so is MFU.
        """
        self._line = ProgressLine(stream=stream, clock=clock)
        self._num_steps, self._log_every, self._clock, self._peak = num_steps, log_every, clock, peak_flops
        # (time, step, tokens computed, tokens expanded, FLOPs), the last three summed since the start
        first = (clock(), start_step, 0, 0, 0.0)
        self._window = collections.deque([first], maxlen=_RATE_WINDOW + 1)

    def advance(self, step: int, tokens_computed: int, tokens_expanded: int, flops: float = 0.0) -> dict[str, Any]:
        """Count a step; rates over the latest steps, for the log.

        Args:
          tokens_computed: tokens of the step that the network saw, each distinct one once, padding not counted.
          tokens_expanded: tokens of its trajectories, each counted in full: the useful work.
          flops: of the model for the step; see training.flops.
        """
        _, _, computed, expanded, total = self._window[-1]
        self._window.append(
            (self._clock(), step, computed + tokens_computed, expanded + tokens_expanded, total + flops)
        )
        (t0, s0, c0, e0, f0), (t1, s1, c1, e1, f1) = self._window[0], self._window[-1]
        seconds = max(t1 - t0, 1e-9)
        rate = (f1 - f0) / seconds
        return {
            "steps_per_second": (s1 - s0) / seconds,
            "tokens_per_second": (c1 - c0) / seconds,
            "expanded_tokens_per_second": (e1 - e0) / seconds,
            "model_flops_per_second": rate,
            "mfu": rate / self._peak if self._peak else None,
        }

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Draw the line (terminal), or print it every log_every steps and at the last one."""
        due = step % self._log_every == 0 or step == self._num_steps
        self._line.show(lambda: self._text(step, values), due=due)

    def log(self, text: str) -> None:
        """Print a line of its own, above the updating one."""
        self._line.log(text)

    def finish(self) -> None:
        """Leave the updating line as it is and go to the next."""
        self._line.leave()

    def _text(self, step: int, values: Mapping[str, Any]) -> str:
        left = (self._num_steps - step) / max(values["steps_per_second"], 1e-9)
        mfu = f"MFU {values['mfu']:.1%}  " if values.get("mfu") is not None else ""
        return (
            f"step {step}/{self._num_steps}  C={values['granularity']}  loss {values['loss']:.4f}  "
            f"accuracy {values['step_accuracy']:.3f}  rate {values['learning_rate']:.2e}  "
            f"{values['tokens_per_second']:,.0f} tokens/s (expanded {values['expanded_tokens_per_second']:,.0f})  "
            f"{mfu}left {duration(left)}"
        )
