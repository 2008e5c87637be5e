"""python -m cfprm_jax.prepare: converts corpora of any format to stepwise JSON lines at given granularities."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys
import time

from cfprm_jax import flags
from cfprm_jax.data.preparing import prepare
from cfprm_jax.data.preparing_options import PrepareConfig
from cfprm_jax.report import corpus


def main(config: PrepareConfig) -> int:
    """The command. See :class:`PrepareConfig`."""
    started = time.monotonic()
    prepared = prepare(config, functools.partial(print, flush=True))
    print(corpus.summary(prepared.report))
    if prepared.bad_rows is not None:
        print(f"malformed rows: {prepared.bad_rows}")
    print(f"wrote {prepared.output} and {prepared.report_path} in {time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(PrepareConfig, main))
