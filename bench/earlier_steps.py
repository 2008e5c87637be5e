"""The train step without one of the things that made it faster, for bench/profile_step.py: what each is worth."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from cfprm_jax.models import embedding, layers
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.products import matmul_precision


def product_over_all_axes(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """models.products.times without one axis for all tokens."""
    return jnp.einsum("...i,oi->...o", x, kernel.astype(x.dtype), precision=matmul_precision(x.dtype))


def indexed(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """models.embedding.take with the gradient that JAX has for indexing."""
    return table[tokens].astype(dtype)


@dataclasses.dataclass(frozen=True)
class Earlier:
    """A step that does without something.

    Attributes:
      network: the model's options, from the present ones.
      patch: object, attribute and value while the step is traced; None where the options suffice.
    """

    network: Callable[[PRMConfig], PRMConfig] = lambda network: network
    patch: tuple[Any, str, Any] | None = None

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with mock.patch.object(*self.patch) if self.patch else contextlib.nullcontext():
            yield


EARLIER = {
    "all pairs in memory (--attention=xla)": Earlier(lambda network: dataclasses.replace(network, attention="xla")),
    "layers recomputed (--remat=layer)": Earlier(lambda network: dataclasses.replace(network, remat="layer")),
    "products over rows and tokens": Earlier(patch=(layers, "times", product_over_all_axes)),
    "embedding by indexing": Earlier(patch=(embedding, "take", indexed)),
}
