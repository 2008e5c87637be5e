"""python -m cfprm_jax.prm_bench: detection of incorrect and redundant steps, by error class."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.benchmarks import prm_bench
from cfprm_jax.benchmarks.options import PRMBenchConfig
from cfprm_jax.report import prm_bench as report


def main(config: PRMBenchConfig) -> int:
    """The command. See :class:`PRMBenchConfig`."""
    outcome = prm_bench.run(config, functools.partial(print, flush=True))
    if outcome is not None:
        names = ", ".join(map(str, prm_bench.files(config.output_dir)))
        print(f"\n{report.document(outcome)}\nresults     {names}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(PRMBenchConfig, main))
