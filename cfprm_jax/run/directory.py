"""The directory of a run: what is in it, whether it may be used, and the description of the model that it keeps.

config.json, run.flags    the resolved flags
corpus.json               counts of the training corpus, skipped and malformed rows
metrics.jsonl             a line a step; tensorboard/ beside it
model/                    config.json and tokenizer as Hugging Face has them, prm.json with what makes it a PRM, and
                          checksums.json of these
checkpoints/STEP/         Orbax
lock                      held by the process that trains
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import file_schemas, loading, schema
from cfprm_jax.huggingface.json_files import read_object
from cfprm_jax.huggingface.reserved_tokens import RENAMED_FROM
from cfprm_jax.huggingface.tokenizer_files import marker_origin, save_tokenizer
from cfprm_jax.runtime import atomic, digests, locks, output_paths

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
CORPUS = "corpus.json"
FLAGS = "run.flags"
GENERATION = "generation_config.json"
LOCK = "lock"
METRICS = "metrics.jsonl"
MODEL = "model"
MODEL_CHECKSUMS = "checksums.json"
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


def read_prm(directory: pathlib.Path) -> tuple[dict[str, Any], EncodingConfig | None]:
    """What prm.json of a directory holds, and the encoding that it names; nothing if there is no such file.

    Raises:
      UserError: a field is not what write_model or an export writes (file_schemas.PRM).
    """
    path = directory / PRM_FILE
    if not path.exists():
        return {}, None
    meta = read_object(path)
    schema.check(meta, file_schemas.PRM, str(path))
    try:
        return meta, EncodingConfig(**meta["encoding"])
    except UserError as error:
        raise UserError(f"{path}: encoding: {error}") from error


def compute_dtype(dtype: str, meta: Mapping[str, Any], weights: pathlib.Path | None = None) -> str:
    """What "auto" stands for: the type that a run was trained in, else that of a directory's weights; or dtype itself.

    Args:
      meta: of prm.json.
      weights: a Hugging Face directory; None for a run, whose prm.json has the type.

    Raises:
      UserError: the directory holds no readable safetensors files, or there is none and prm.json has no type.
    """
    if dtype != "auto":
        return dtype
    if "dtype" in meta:
        return str(meta["dtype"])
    if weights is None:
        raise UserError(f"{PRM_FILE} of the run has no dtype; name --dtype=float32 or --dtype=bfloat16")
    return loading.stored_dtype(weights)


def write_corpus(output_dir: pathlib.Path, report: dict[str, Any]) -> None:
    """corpus.json: what the training corpus holds, and what was skipped, truncated or malformed, row by row."""
    atomic.write_json(output_dir / CORPUS, report, indent=1)


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
    prm = {
        "head": model.head,
        "dtype": model.dtype,
        "encoding": dataclasses.asdict(encoding),
        "loss": loss.loss,
        "margin": loss.margin,
        "granularities": list(granularity.stages),
        "schedule": granularity.schedule,
    }
    if (origin := marker_origin(tokenizer)) is not None:
        prm[RENAMED_FROM] = origin
    if lora is not None:
        prm["lora"] = dict(lora)
    with atomic.updated_directory(output_dir / MODEL) as directory:
        save_tokenizer(tokenizer, directory)
        atomic.write_json(directory / CONFIG, backbone_config)
        if source is not None and (source / GENERATION).is_file():
            shutil.copyfile(source / GENERATION, directory / GENERATION)
        atomic.write_json(directory / PRM_FILE, prm)
        written = sorted(path.name for path in directory.iterdir())
        atomic.write_json(directory / MODEL_CHECKSUMS, {name: _model_digest(directory / name) for name in written})


def check_model(directory: pathlib.Path) -> None:
    """Compare the files of model/ with what the run wrote; runs of earlier versions have nothing to compare with.

    Raises:
      UserError: naming a file that has changed or is missing.
    """
    path = directory / MODEL_CHECKSUMS
    if not path.is_file():
        return
    again = "train --resume=auto of the run writes it again"
    try:
        written = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}; {again}") from error
    for name, digest in written.items():
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing; {again}")
        if _model_digest(directory / name) != digest:
            raise UserError(
                f"{directory / name} has changed since the run wrote it (its SHA-256 is not that in {path}); {again}; "
                f"after a change that is meant, delete {path}"
            )


def _model_digest(path: pathlib.Path) -> str:
    """Of a file of model/. Where the backbone of adapters is may be changed in prm.json: it may have moved."""
    if path.name == PRM_FILE:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            prm = json.loads(path.read_text(encoding="utf-8"))
            lora = prm.get("lora") and {**prm["lora"], "backbone": None}
            return digests.of_json({**prm, "lora": lora})
    return digests.of_file(path)
