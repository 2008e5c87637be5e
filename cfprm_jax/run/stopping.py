"""How a run ends that a signal stops: its exit status, and the line about resuming it."""

from __future__ import annotations

import pathlib
import shlex
import signal
from typing import NoReturn

from cfprm_jax.checkpoints import saving
from cfprm_jax.run.directory import FLAGS
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime.distributed import Processes


def resume_with(output_dir: pathlib.Path) -> str:
    """The command that resumes a run with a checkpoint."""
    flagfile = shlex.quote(str(output_dir / FLAGS))
    return f"resume with: python -m cfprm_jax.train --flagfile={flagfile} --resume=auto"


def exit_status(config: TrainConfig, received: signal.Signals) -> int:
    """The exit status of a run that a signal stopped."""
    return 130 if received == signal.SIGINT else config.run.preemption_exit_code


def end_by_signal(config: TrainConfig, processes: Processes, received: signal.Signals) -> NoReturn:
    """End at once, before the first step or after the last: nothing is left to save."""
    output_dir = pathlib.Path(config.run.output_dir)
    saved = saving.newest(output_dir) if config.run.output_dir else None
    if saved is None:
        line = "no step is saved yet; start the same command again, with --resume=auto"
    else:
        line = f"step {saved:,} is saved; {resume_with(output_dir)}"
    processes.stop(f"stopped by {received.name}; {line}", exit_status(config, received))
