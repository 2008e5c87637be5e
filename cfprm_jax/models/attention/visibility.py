"""Visibility: the tree rule for tokens, and for blocks of a row those pairs with any visible token pair."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class VisibleBlocks(NamedTuple):
    """For each block of one side, the blocks of the other side that are visible, ascending.

    Attributes:
      which: int32 [rows * blocks * blocks]; behind the visible ones their last is repeated, which a kernel that fetches
        ahead need not fetch again.
      counts: int32 [rows * blocks], how many are visible; at least 1.
    """

    which: jax.Array
    counts: jax.Array


def visible(subtree_end: Int[Array, "rows length"]) -> Bool[Array, "rows length length"]:
    """The tree rule as a mask: [row, i, j] is whether token i sees token j."""
    token = jnp.arange(subtree_end.shape[1])
    causal = token[None, :] <= token[:, None]
    return causal & (token[:, None] < subtree_end[:, None, :])


def pad_rows(
    arrays: tuple[jax.Array, ...], subtree_end: Int[Array, "rows length"], multiple: int
) -> tuple[tuple[jax.Array, ...], Int[Array, "rows padded"]]:
    """Arrays of [rows, length, ...] and subtree_end, int32, with lengths made multiples by padding that sees itself."""
    rows, length = subtree_end.shape
    more = -length % multiple
    own = jnp.broadcast_to(jnp.arange(length + 1, length + more + 1, dtype=jnp.int32), (rows, more))
    ends = jnp.concatenate([subtree_end.astype(jnp.int32), own], axis=1)
    return tuple(jnp.pad(x, ((0, 0), (0, more), *(((0, 0),) * (x.ndim - 2)))) for x in arrays), ends


def visible_blocks(ends: Int[Array, "rows length"], block: int) -> Bool[Array, "rows blocks blocks"]:
    """[row, i, j] is whether some token of block i sees one of block j."""
    first = jnp.arange(ends.shape[1] // block) * block
    # The first query of a later block comes after every key of an earlier one, and is the one that most of them reach.
    reach = ends.reshape(len(ends), -1, block).max(axis=2)
    return (first[None, :] == first[:, None]) | (
        (first[None, :] < first[:, None]) & (reach[:, None, :] > first[:, None])
    )


def list_visible(visible: Bool[Array, "rows blocks blocks"]) -> VisibleBlocks:
    """The visible blocks of each block, as a list."""
    count = visible.sum(axis=2, dtype=jnp.int32)
    order = jnp.argsort(~visible, axis=2, stable=True).astype(jnp.int32)
    last = jnp.take_along_axis(order, count[..., None] - 1, axis=2)
    which = jnp.where(jnp.arange(visible.shape[2]) < count[..., None], order, last)
    # Flat: scalar memory of a TPU pads the last dimensions of other shapes.
    return VisibleBlocks(which.reshape(-1), count.reshape(-1))
