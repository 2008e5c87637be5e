"""The folder model/ of a run: the files that scoring and export need besides the weights, and their checksums."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import transformers

from cfprm_jax.checkpoints import prm_file
from cfprm_jax.checkpoints.prm_file import PRM_FILE
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.tokenizer_files import marker_origin, save_tokenizer
from cfprm_jax.runtime import atomic, digests

GENERATION = "generation_config.json"
MODEL = "model"
MODEL_CHECKSUMS = "checksums.json"


def write_model(
    output_dir: pathlib.Path,
    backbone_config: dict[str, Any],
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    model: ModelConfig,
    encoding: EncodingConfig,
    loss: LossConfig,
    granularity: GranularityConfig,
    source: pathlib.Path | None = None,
    frozen: Mapping[str, Any] | None = None,
) -> None:
    """model/: all that scoring and export need beside the weights.

    Args:
      backbone_config: config.json of the backbone as it was read.
      source: directory of the backbone, whose generation_config.json is kept if it has one.
      frozen: what is frozen, and where its weights are (:func:`cfprm_jax.checkpoints.frozen.record`).
    """
    prm = prm_file.described(model, encoding, loss, granularity, renamed_from=marker_origin(tokenizer), frozen=frozen)
    with atomic.updated_directory(output_dir / MODEL) as directory:
        save_tokenizer(tokenizer, directory)
        atomic.write_json(directory / "config.json", backbone_config)
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
    """The digest of a file of model/. In prm.json the place of the frozen weights is excluded: they may be moved."""
    if path.name == PRM_FILE:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            prm = json.loads(path.read_text(encoding="utf-8"))
            lora = prm.get("lora") and {**prm["lora"], "backbone": None}
            frozen = {"frozen": {**prm["frozen"], "backbone": None}} if "frozen" in prm else {}
            return digests.of_json({**prm, "lora": lora, **frozen})
    return digests.of_file(path)
