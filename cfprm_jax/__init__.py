"""Coarse-to-fine process reward models in JAX.

Importing the package costs nothing; what needs JAX or transformers is imported on first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfprm_jax import data, losses
    from cfprm_jax.inference.load import load

__all__ = ["data", "load", "losses"]

# transformers, of which only tokenizers are used, would begin every command with the advice to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    if name == "load":
        from cfprm_jax.inference.load import load

        return load
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
