"""python -m cfprm_jax.experiment: the paper's grid of training runs, with tables, a figure and findings."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys
import time

from cfprm_jax import flags
from cfprm_jax.experiments.options import ExperimentConfig
from cfprm_jax.experiments.run import run
from cfprm_jax.runtime.progress import counted, duration


def main(config: ExperimentConfig) -> int:
    """The command. See :class:`ExperimentConfig`."""
    started = time.monotonic()
    log = functools.partial(print, flush=True)
    summary = run(config, log)
    log(f"\n{summary.text}")
    log(f"done        {counted(summary.cells, 'cell')} in {duration(time.monotonic() - started)}")
    log(f"results     {config.output_dir}: {', '.join(summary.files)}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(ExperimentConfig, main))
