"""python -m cfprm_jax.process_bench: accuracy and F1 of a PRM on ProcessBench."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.benchmarks import process_bench
from cfprm_jax.benchmarks.options import ProcessBenchConfig
from cfprm_jax.report import process_bench as report


def main(config: ProcessBenchConfig) -> int:
    """The command. See :class:`ProcessBenchConfig`."""
    outcome = process_bench.run(config, functools.partial(print, flush=True))
    if outcome is not None:
        names = ", ".join(map(str, process_bench.files(config.output_dir)))
        print(f"\n{report.document(outcome)}\nresults     {names}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(ProcessBenchConfig, main))
