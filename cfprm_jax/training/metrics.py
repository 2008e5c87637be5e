"""What a run tells: metrics.jsonl and TensorBoard on disk, one updating line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import tensorboardX

from cfprm_jax.training.run_directory import METRICS, TENSORBOARD

# A terminal is not written to more often than this.
_SECONDS_BETWEEN_UPDATES = 0.1
# Rates are averaged over so many of the latest steps: enough to be steady, few enough to follow a change of stage.
_RATE_WINDOW = 20


def truncate(path: pathlib.Path, step: int) -> int:
    """Drop the lines after a step, and a last line that a killed run left half written; returns how many went.

    A resumed run computes those steps again, so that each step is in the file once.
    """
    if not path.exists():
        return 0
    lines, kept = path.read_text().splitlines(keepends=True), []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and row["step"] <= step:
            kept.append(line)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(kept))
    os.replace(scratch, path)  # noqa: PTH105 -- pathlib's replace is the same; this names the atomicity
    return len(lines) - len(kept)


class MetricLog:
    """metrics.jsonl, one JSON object a line in the order of steps, and TensorBoard. NaN is null in the file."""

    def __init__(self, output_dir: pathlib.Path, start_step: int):
        """Go on after start_step (0 for a new run): later lines and points are dropped."""
        output_dir.mkdir(parents=True, exist_ok=True)
        truncate(output_dir / METRICS, start_step)
        self._file = (output_dir / METRICS).open("a")
        self._board = tensorboardX.SummaryWriter(str(output_dir / TENSORBOARD), purge_step=start_step + 1)

    def write(self, step: int, values: Mapping[str, Any], board: str = "") -> None:
        """Append {"step": step, ...values}; numbers go to TensorBoard too, under board, unless it is empty."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if board:
            for name, value in finite.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{board}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


class Progress:
    """Where the run is, how fast, and how long it will take."""

    def __init__(
        self,
        stream: TextIO,
        start_step: int,
        num_steps: int,
        log_every: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._stream, self._num_steps, self._log_every, self._clock = stream, num_steps, log_every, clock
        self._terminal = stream.isatty()
        # (time, step, tokens computed, tokens expanded), the last two summed since the start
        first = (clock(), start_step, 0, 0)
        self._window = collections.deque([first], maxlen=_RATE_WINDOW + 1)
        self._drawn = -math.inf

    def advance(self, step: int, tokens_computed: int, tokens_expanded: int) -> dict[str, float]:
        """A step is done: rates over the latest steps, for the log.

        Args:
          tokens_computed: tokens of the step that the network saw, padding not counted.
          tokens_expanded: tokens of its trajectories, each counted in full: the useful work.
        """
        _, _, computed, expanded = self._window[-1]
        self._window.append((self._clock(), step, computed + tokens_computed, expanded + tokens_expanded))
        (t0, s0, c0, e0), (t1, s1, c1, e1) = self._window[0], self._window[-1]
        seconds = max(t1 - t0, 1e-9)
        return {
            "steps_per_second": (s1 - s0) / seconds,
            "tokens_per_second": (c1 - c0) / seconds,
            "expanded_tokens_per_second": (e1 - e0) / seconds,
        }

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Draw the line (terminal), or print it every log_every steps and at the last one."""
        due = step % self._log_every == 0 or step == self._num_steps
        if self._terminal:
            if due or self._clock() - self._drawn >= _SECONDS_BETWEEN_UPDATES:
                self._drawn = self._clock()
                width = shutil.get_terminal_size().columns - 1
                self._stream.write("\r\x1b[2K" + self._line(step, values)[:width])
                self._stream.flush()
        elif due:
            self.say(self._line(step, values))

    def say(self, text: str) -> None:
        """A line of its own, above the updating one."""
        self._stream.write(("\r\x1b[2K" if self._terminal else "") + text + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Leave the updating line as it is and go to the next."""
        if self._terminal and self._drawn > -math.inf:
            self._stream.write("\n")
            self._stream.flush()

    def _line(self, step: int, values: Mapping[str, Any]) -> str:
        left = (self._num_steps - step) / max(values["steps_per_second"], 1e-9)
        return (
            f"step {step}/{self._num_steps}  C={values['granularity']}  loss {values['loss']:.4f}  "
            f"accuracy {values['step_accuracy']:.3f}  rate {values['learning_rate']:.2e}  "
            f"{values['tokens_per_second']:,.0f} tokens/s (expanded {values['expanded_tokens_per_second']:,.0f})  "
            f"left {duration(left)}"
        )


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
