"""Coarse-to-fine process reward models in JAX.

Importing the package costs nothing; what needs JAX or transformers is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cfprm_jax.inference.load import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from cfprm_jax.inference.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
