"""The type that a model computes in."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from cfprm_jax.checkpoints.prm_file import PRM_FILE
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading


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
