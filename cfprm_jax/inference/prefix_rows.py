"""Rows of which a part is computed already: the tree of a row's sequences, in columns that are cached and columns that
are new.

A row is the tree of :mod:`cfprm_jax.data.packing` in depth-first order, with the same rule: column i sees column j iff
j <= i < subtree_end[j]. Only new columns are queries; cached ones are keys and values in slots of a pool.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, Int64

from cfprm_jax.data.partition import common_prefix, depth_first


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """A solution as token ids, and where its steps are scored.

    Attributes:
      tokens: ids.
      positions: index in tokens of each step's score, ascending.
    """

    tokens: Int32[np.ndarray, " length"]
    positions: Int32[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixRow:
    """One row's tree.

    Attributes:
      tokens, positions, subtree_end: as in PackedBatch, of all columns and without padding.
      slots: slot of each column; -1 for a new one.
      members: indices of the sequences.
      paths: column of each token of each member.
    """

    tokens: Int32[np.ndarray, " columns"]
    positions: Int32[np.ndarray, " columns"]
    subtree_end: Int32[np.ndarray, " columns"]
    slots: Int32[np.ndarray, " columns"]
    members: list[int]
    paths: list[Int64[np.ndarray, " length"]]

    @property
    def new(self) -> Bool[np.ndarray, " columns"]:
        """Which columns are to be computed."""
        return self.slots < 0


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The row lengths that are compiled: of new columns, and of cached ones."""

    new: tuple[int, ...]
    cached: tuple[int, ...]

    @classmethod
    def covering(cls, longest: int, smallest: int = 32) -> Lengths:
        """Powers of two from smallest, and 0 and powers of four from 256, up to what holds the longest sequence."""
        new, cached = [smallest], [0, 256]
        while new[-1] < longest:
            new.append(2 * new[-1])
        while cached[-1] < longest:
            cached.append(4 * cached[-1])
        return cls(tuple(new), tuple(cached))

    def holding(self, new: int, cached: int) -> tuple[int, int]:
        """The shortest lengths that hold the given numbers of columns."""
        return _at_least(self.new, new), _at_least(self.cached, cached)


def _at_least(lengths: Sequence[int], size: int) -> int:
    return lengths[bisect.bisect_left(lengths, size)]


def divide(
    sequences: Sequence[Tokens], matched: Sequence[np.ndarray], lengths: Lengths, attention: float
) -> list[PrefixRow]:
    """The cheapest rows for all sequences in depth-first order: solutions of one question share a row.

    Args:
      sequences: those that have something to compute.
      matched: slots of the cached prefix of each.
      attention: row length at which attention costs as much as all else.
    """
    order = depth_first([sequence.tokens for sequence in sequences])
    shared = [0] + [common_prefix(sequences[a].tokens, sequences[b].tokens) for a, b in itertools.pairwise(order)]
    return [
        _layout(sequences, matched, order[first:end], shared[first:end])
        for first, end in _cuts(sequences, matched, order, shared=shared, lengths=lengths, attention=attention)
    ]


def _cuts(
    sequences: Sequence[Tokens],
    matched: Sequence[np.ndarray],
    order: Sequence[int],
    *,
    shared: Sequence[int],
    lengths: Lengths,
    attention: float,
) -> list[tuple[int, int]]:
    """(first, end) in the order of each row."""
    whole = [len(sequences[i].tokens) for i in order]
    held = [len(matched[i]) for i in order]
    best, cut = [0.0], [0]
    for end in range(1, len(order) + 1):
        found, where, new, cached = math.inf, end - 1, 0, 0  # columns that all but the first add
        for first in range(end - 1, -1, -1):
            row_new, row_cached = new + whole[first] - held[first], cached + held[first]
            if first < end - 1 and (row_new > lengths.new[-1] or row_cached > lengths.cached[-1]):
                break
            padded_new, padded_cached = lengths.holding(row_new, row_cached)
            price = best[first] + padded_new * (1 + (padded_new + padded_cached) / attention)
            if price < found:
                found, where = price, first
            new += whole[first] - max(held[first], shared[first])
            cached += max(0, held[first] - shared[first])
        best.append(found)
        cut.append(where)
    rows, end = [], len(order)
    while end:
        rows.append((cut[end], end))
        end = cut[end]
    return rows[::-1]


def _layout(
    sequences: Sequence[Tokens], matched: Sequence[np.ndarray], members: Sequence[int], shared: Sequence[int]
) -> PrefixRow:
    """The columns of some sequences in depth-first order; shared[k] is what members[k] shares with the one before."""
    common = [0, *shared[1:]]
    total = sum(len(sequences[i].tokens) - same for i, same in zip(members, common, strict=True))
    tokens, positions, ends = (np.zeros(total, np.int32) for _ in range(3))
    slots = np.full(total, -1, np.int32)
    path = np.zeros(max(len(sequences[i].tokens) for i in members), np.int64)
    paths: list[np.ndarray] = []
    depth = column = 0
    for i, same in zip(members, common, strict=True):
        # What lies deeper on the path than the branch has no further descendants.
        ends[path[same:depth]] = column
        depth = len(sequences[i].tokens)
        own = slice(column, column + depth - same)
        tokens[own] = sequences[i].tokens[same:]
        positions[own] = np.arange(same, depth)
        path[same:depth] = np.arange(own.start, own.stop)
        held = matched[i][same:]
        slots[column : column + len(held)] = held
        column = own.stop
        paths.append(path[:depth].copy())
    ends[path[:depth]] = column
    return PrefixRow(tokens, positions, ends, slots, list(members), paths)
