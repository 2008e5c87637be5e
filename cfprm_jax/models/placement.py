"""Placement of activations by their logical axes; the model itself has no reference to a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from cfprm_jax.models import embedding

Axes = tuple[str | None, ...]
"""Logical axes of an array, one a dimension: those of ParamSpec, "rows" and "length"; None is never split."""


class Placement:
    """The placement on a single device, which adds no constraint; subclasses override the methods."""

    def __call__(self, activation: jax.Array, axes: Axes) -> jax.Array:
        """The activation, with a sharding constraint."""
        del axes
        return activation

    def per_device(self, function: Callable[..., Any], inputs: tuple[Axes, ...], output: Axes) -> Callable[..., Any]:
        """The function, run on every device on its own part of the inputs.

        For what XLA's partitioner cannot split by itself: kernels.

        Args:
          function: of arrays, independent along every axis that is split.
          inputs: the axes of its arguments.
          output: the axes of its result.
        """
        del inputs, output
        return function

    def embed(self, table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
        """The row [embed] of a table [vocab, embed] for each of the tokens [rows, length], in dtype."""
        return embedding.take(table, tokens, dtype)


unconstrained = Placement()
"""A single device."""
