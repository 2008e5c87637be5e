"""prm.json: the description of a PRM (head, encoding, compute type) and of its training."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import file_schemas, schema
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.model_directory.reserved_tokens import RENAMED_FROM

PRM_FILE = "prm.json"


def read_prm(directory: pathlib.Path) -> tuple[dict[str, Any], EncodingConfig | None]:
    """The content of a directory's prm.json, and its encoding; empty if there is no such file.

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


def described(
    model: ModelConfig,
    encoding: EncodingConfig,
    loss: LossConfig,
    granularity: GranularityConfig,
    *,
    renamed_from: str | None = None,
    frozen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The object of prm.json of a run.

    Args:
      renamed_from: the token that the marker was in the backbone's tokenizer, if it had another name.
      frozen: what is frozen, and where its weights are (:func:`cfprm_jax.checkpoints.frozen.record`).
    """
    prm: dict[str, Any] = {
        "head": model.head,
        "dtype": model.dtype,
        "encoding": dataclasses.asdict(encoding),
        "loss": loss.loss,
        "margin": loss.margin,
        **({"redundancy": True, "redundancy_weight": loss.redundancy_weight} if loss.redundancy else {}),
        "granularities": list(granularity.stages),
        "schedule": granularity.schedule,
    }
    if renamed_from is not None:
        prm[RENAMED_FROM] = renamed_from
    return prm | dict(frozen or {})
