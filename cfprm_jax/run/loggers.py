"""Optional loggers beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio.

metrics.jsonl is the source of truth. A logger is imported when it is opened, in the main process only, and can never
end a run: one that fails is reported once and dropped.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cfprm_jax.run.directory import LOGGER_ID, TENSORBOARD
from cfprm_jax.runtime import atomic

PROJECT = "cfprm_jax"
"""Project of W&B and Trackio; for W&B the environment variable WANDB_PROJECT comes first."""


class Logger(Protocol):
    """Takes metrics as "group/name" -> value."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """What a logger is opened with.

    Attributes:
      directory: of the run.
      start_step: 0 for a new run; points after it are written again.
      config: the resolved flags.
    """

    directory: pathlib.Path
    start_step: int = 0
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the run in a user interface."""
        return self.directory.resolve().name

    def logger_id(self) -> str:
        """The id of the run in W&B and Trackio; the same after a resume, as it is stored in the directory."""
        path = self.directory / LOGGER_ID
        if path.is_file():
            return path.read_text().strip()
        new = secrets.token_hex(4)
        atomic.write_text(path, f"{new}\n")
        return new


class TensorBoard:
    """Event files in the directory of the run."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._event, self._scalar = event_pb2.Event, summary.scalar
        directory = run.directory / TENSORBOARD
        directory.mkdir(parents=True, exist_ok=True)
        # Not SummaryWriter: its thread dies of a full disk, and the next points would wait for it for ever.
        self._writer = EventsWriter(str(directory / "events"))
        # TensorBoard then drops the points that an earlier process wrote at these steps.
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(step=run.start_step + 1, session_log=started)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add(step=step, summary=self._scalar(name, value))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))


class Wandb:
    """Weights & Biases; a resumed run continues the same W&B run.

    W&B ignores points before its newest step: those that a resumed run computes again, to the same values.
    """

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            dir=str(run.directory),
            config=dict(run.config),
            resume="allow",
            id=run.logger_id(),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, which identifies runs by their names: the id is part of it, so that equal directory names differ.

    Trackio keeps the points of repeated steps: those that a resumed run computes again occur twice, with equal values.
    """

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._trackio = trackio
        name = f"{run.name}-{run.logger_id()}"
        trackio.init(project=PROJECT, name=name, config=dict(run.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""--logger -> class."""


class Loggers:
    """The loggers of a run; those that fail are reported once and dropped."""

    def __init__(self, names: tuple[str, ...], run: LoggedRun, report: Callable[[str], None]) -> None:
        """Open the loggers of these names.

        Args:
          report: takes a line about a logger that failed.
        """
        self._report = report
        self._open: dict[str, Logger] = {}
        for name in dict.fromkeys(names):
            self._guarded(name, functools.partial(self._open_one, name, run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log finite numbers."""
        for name, logger in list(self._open.items()):
            self._guarded(name, functools.partial(logger.log, step, values))

    def close(self) -> None:
        """Finish all that are open."""
        for name, logger in list(self._open.items()):
            self._guarded(name, logger.close)
        self._open.clear()

    def _open_one(self, name: str, run: LoggedRun) -> None:
        self._open[name] = LOGGERS[name](run)

    def _guarded(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # whatever it is, training continues
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                reason = f"it is not installed: pip install '.[{name}]'"
            self._report(f"logger      {name} is dropped, and metrics.jsonl has all metrics: {reason}")
