"""python -m cfprm_jax.plan: does a training configuration fit an accelerator? Compiled for it, on any machine."""

from __future__ import annotations

import os

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: accelerators of this machine are not used

import functools
import pathlib
import sys

from cfprm_jax import flags
from cfprm_jax.planning import verdict
from cfprm_jax.planning.options import PlanConfig
from cfprm_jax.runtime import atomic, output_paths
from cfprm_jax.runtime.regular_files import check_output


def main(config: PlanConfig) -> int:
    """The command."""
    output = config.plan.output
    if output:
        output_paths.require_directory(f"--output={output}", pathlib.Path(output).parent)
        check_output(output, "--output")
    found = verdict.plan(config, functools.partial(print, flush=True))
    if output:
        atomic.write_json(output, verdict.as_json(found))
    return 0 if found.fits else 1


if __name__ == "__main__":
    sys.exit(flags.run(PlanConfig, main))
