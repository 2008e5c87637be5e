"""python -m cfprm_jax.train: from labelled solutions and a backbone to a trained process reward model."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

from cfprm_jax.runtime.signals import StopSignal

if __name__ == "__main__":
    # Before the other imports, which take seconds. main() handles a SIGTERM that arrives in between.
    STOP_SIGNAL = StopSignal()
    STOP_SIGNAL.end_with(process.end_by_interrupt)
    STOP_SIGNAL.install()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.run.execute import execute
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.stopping import end_by_signal
from cfprm_jax.run.validate import refuse_unused, validate_options
from cfprm_jax.runtime import distributed
from cfprm_jax.runtime.distributed import Processes


def main(config: TrainConfig, stop_signal: StopSignal | None = None) -> int:
    """The command; with several processes, in each of them.

    Args:
      stop_signal: an installed handler of signals, for a process that may end at any time; by default signals are
        handled between the first training step and the last.
    """
    if stop_signal is not None:
        stop_signal.end_with(functools.partial(end_by_signal, config, Processes()))
    validate_options(config)
    refuse_unused(config)
    with distributed.session(config.distributed, config.device.platform) as processes:
        if stop_signal is not None:
            stop_signal.end_with(functools.partial(end_by_signal, config, processes))
        stop_signal = stop_signal or StopSignal()
        status = execute(config, processes, stop_signal)
        stop_signal()  # the run is complete: signals change nothing any more
        return status


if __name__ == "__main__":
    sys.exit(flags.run(TrainConfig, functools.partial(main, stop_signal=STOP_SIGNAL)))
