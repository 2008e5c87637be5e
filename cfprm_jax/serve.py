"""python -m cfprm_jax.serve: a server of step scores."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.runtime.progress import counted
from cfprm_jax.serving.options import ServeConfig
from cfprm_jax.serving.run import serve


def main(config: ServeConfig) -> int:
    """The command. See :class:`ServeConfig`."""
    summary = serve(config, functools.partial(print, flush=True))
    print(
        f"done        {counted(summary.batches, 'batch')}, {counted(summary.requested, 'token')}: "
        f"{summary.computed:,} computed, {summary.reused:,} cached"
    )
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(flags.run(ServeConfig, main))
