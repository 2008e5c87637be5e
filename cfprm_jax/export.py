"""python -m cfprm_jax.export: exports a trained PRM as a Hugging Face directory for transformers, vLLM or PEFT."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import pathlib
import sys

from cfprm_jax import flags
from cfprm_jax.huggingface import hub
from cfprm_jax.run.export import export_run
from cfprm_jax.run.options import ExportConfig
from cfprm_jax.runtime.progress import counted


def main(config: ExportConfig) -> None:
    """The command. See :class:`ExportConfig`."""
    if config.push_to_hub:
        hub.check_name(config.push_to_hub)
    report = export_run(config, functools.partial(print, flush=True))
    print(
        f"wrote {config.output_dir}: {counted(report.parameters, 'parameter')}, {report.stored_bytes / 1e9:.2f} GB "
        f"in {counted(len(report.files), 'file')} of weights",
        flush=True,
    )
    if config.push_to_hub:
        print(
            f"uploaded: {hub.upload(pathlib.Path(config.output_dir), config.push_to_hub, config.private)}", flush=True
        )


if __name__ == "__main__":
    sys.exit(flags.run(ExportConfig, main))
