"""python -m cfprm_jax.bon: Best-of-N accuracies of scored candidates, beside votes, pass@1 and the oracle."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import pathlib
import sys

from cfprm_jax import flags
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.report import best_of_n, results


def main(config: BonConfig) -> int:
    """The command. See :class:`BonConfig`."""
    result = best_of_n.run(config, functools.partial(print, flush=True))
    directory = pathlib.Path(config.output_dir)
    print(
        f"\n{result.summary}\n"
        f"results     {directory / results.RESULTS}, {results.TABLE}, {results.LATEX}, {results.PLOT}"
    )
    print(f"report      {directory / results.PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BonConfig, main))
