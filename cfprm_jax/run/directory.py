"""The directory of a run: its files, whether it may be used, and the description of the model that it holds.

config.json, run.flags    the resolved flags
corpus.json               counts of the training and held-out corpora, skipped and malformed rows
metrics.jsonl             a line a step; tensorboard/ beside it
logger_id                 of the run in W&B and Trackio
model/                    config.json and tokenizer in Hugging Face's format, prm.json with the options of the PRM,
                          and checksums.json of these
checkpoints/STEP/         Orbax
lock                      held by the process that trains
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from cfprm_jax.checkpoints.model_files import MODEL
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, locks, output_paths

CONFIG = "config.json"
CORPUS = "corpus.json"
FLAGS = "run.flags"
LOCK = "lock"
LOGGER_ID = "logger_id"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def check(output_dir: str, resume: str) -> pathlib.Path:
    """The run directory, which must hold no run, or one to resume. Writes nothing.

    Raises:
      UserError: --output_dir is missing or a file, holds another run under --resume=never, or none under always.
    """
    if not output_dir:
        raise UserError("--output_dir is missing: the directory that checkpoints, metrics and the model are written to")
    path = pathlib.Path(output_dir)
    output_paths.require_directory(f"--output_dir={output_dir}", path)
    held = [name for name in (CONFIG, METRICS, CHECKPOINTS, MODEL) if (path / name).exists()]
    if held and resume == "never":
        raise UserError(
            f"--output_dir={output_dir} holds another run ({', '.join(held)}): choose another directory, "
            "or resume that run with --resume=auto"
        )
    if resume == "always" and CONFIG not in held:
        raise UserError(f"--resume=always: --output_dir={output_dir} holds no run to resume (no {CONFIG} there)")
    return path


@contextlib.contextmanager
def locked(path: pathlib.Path, resume: str) -> Iterator[None]:
    """Lock a run directory, which is created, against other processes; a killed process releases it too.

    Raises:
      UserError: another process is training there, or has trained there since :func:`check`.
    """
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with locks.held(path / LOCK, remove=True) as granted:
            if not granted:
                raise UserError(f"--output_dir={path}: another process is training there")
            check(str(path), resume)
            yield
    finally:
        if made:  # and nothing was written
            with contextlib.suppress(OSError):
                path.rmdir()


def write_corpus(output_dir: pathlib.Path, report: dict[str, Any]) -> None:
    """Write corpus.json: counts of the training and held-out corpora, and what was skipped, truncated or malformed."""
    atomic.write_json(output_dir / CORPUS, report, indent=1)
