"""The directory of a run: what is in it, whether it may be used, and the description of the model that it keeps.

config.json, run.flags    the resolved flags
corpus.json               counts of the training corpus, skipped and malformed rows
metrics.jsonl             a line a step; tensorboard/ beside it
model/                    config.json and tokenizer as Hugging Face has them, prm.json with what makes it a PRM
checkpoints/STEP/         Orbax
lock                      held by the process that trains
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig
from cfprm_jax.data.encoding import save_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import HEADS
from cfprm_jax.runtime import output_paths

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
CORPUS = "corpus.json"
FLAGS = "run.flags"
GENERATION = "generation_config.json"
LOCK = "lock"
METRICS = "metrics.jsonl"
MODEL = "model"
PRM_FILE = "prm.json"
TENSORBOARD = "tensorboard"


def check(output_dir: str, resume: str) -> pathlib.Path:
    """The run directory, which must hold no run, or one if it is to be gone on with. Nothing is written yet.

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
            "or go on with that run by --resume=auto"
        )
    if resume == "always" and CONFIG not in held:
        raise UserError(f"--resume=always: --output_dir={output_dir} holds no run to go on with (no {CONFIG} there)")
    return path


@contextlib.contextmanager
def locked(path: pathlib.Path, resume: str) -> Iterator[None]:
    """Keep other processes from training in a run directory, which is created; ends with the process, however it ends.

    Raises:
      UserError: another process is training there, or has done so since :func:`check`.
    """
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"--output_dir={path}: another process is training there") from error
        except OSError:  # a file system without locks: no worse than not asking
            pass
        check(str(path), resume)
        yield


def read_prm(directory: pathlib.Path) -> tuple[dict[str, Any], EncodingConfig | None]:
    """What prm.json of a directory holds, and the encoding that it names; nothing if there is no such file.

    Raises:
      UserError: it is not what write_model or an export wrote.
    """
    path = directory / PRM_FILE
    if not path.is_file():
        return {}, None
    try:
        meta = json.loads(path.read_text())
        if meta["head"] not in HEADS:
            raise ValueError(f"head is {meta['head']!r}")
        return meta, EncodingConfig(**meta["encoding"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not the description of a PRM that this version writes: {error!r}") from error


def compute_dtype(dtype: str, meta: dict[str, Any], backbone_config: dict[str, Any]) -> str:
    """What "auto" stands for: the type that a run was trained in, else that of a directory's weights; or dtype itself.

    Args:
      meta: of prm.json.
      backbone_config: config.json.
    """
    if dtype != "auto":
        return dtype
    stored = meta.get("dtype") or backbone_config.get("dtype") or backbone_config.get("torch_dtype")
    return "float32" if stored == "float32" else "bfloat16"


def write_corpus(output_dir: pathlib.Path, report: dict[str, Any]) -> None:
    """corpus.json: what the training corpus holds, and what was skipped, truncated or malformed, row by row."""
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    (output_dir / CORPUS).write_text(text, encoding="utf-8", errors="backslashreplace")


def write_model(
    output_dir: pathlib.Path,
    backbone_config: dict[str, Any],
    tokenizer: transformers.PreTrainedTokenizerBase,
    model: ModelConfig,
    encoding: EncodingConfig,
    loss: LossConfig,
    granularity: GranularityConfig,
    source: pathlib.Path | None = None,
    lora: Mapping[str, Any] | None = None,
) -> None:
    """model/: all that scoring and export need beside the weights.

    Args:
      backbone_config: config.json of the backbone as it was read.
      source: directory of the backbone, whose generation_config.json is kept if it has one.
      lora: adapters and where their backbone is, of a run that trains adapters.
    """
    directory = output_dir / MODEL
    directory.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, directory)
    (directory / CONFIG).write_text(json.dumps(backbone_config, indent=2) + "\n")
    if source is not None and (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, directory / GENERATION)
    prm = {
        "head": model.head,
        "dtype": model.dtype,
        "encoding": dataclasses.asdict(encoding),
        "loss": loss.loss,
        "margin": loss.margin,
        "granularities": list(granularity.stages),
        "schedule": granularity.schedule,
    }
    if lora is not None:
        prm["lora"] = dict(lora)
    (directory / PRM_FILE).write_text(json.dumps(prm, indent=2) + "\n")
