"""Where the distinct tokens of solutions are stored: each prefix once, in depth-first order.

Solutions that share a prefix share its tokens and whatever a causal model computes for them. In depth-first order each
solution adds its tokens after the prefix that it shares with the one before it, so what is stored is one sequence, and
the place of each token follows from lengths and shared prefixes alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32, Int64

from cfprm_jax.data.partition import shared_forest


class PrefixPlaces:
    """The places of the tokens of some solutions.

    Attributes:
      tokens: number of distinct ones.
    """

    def __init__(
        self,
        order: Int64[np.ndarray, " solutions"],
        shared: Int64[np.ndarray, " solutions"],
        lengths: Int64[np.ndarray, " solutions"],
    ) -> None:
        """Places of solutions in a depth-first order.

        Args:
          order: the solutions in depth-first order; that of several records, one after another, is one too.
          shared: of each in that order, tokens that it shares with the one before it.
          lengths: tokens of each solution, by its number.
        """
        self.order, self._shared = np.asarray(order), np.asarray(shared)
        self._lengths = np.asarray(lengths)
        self._rank = np.empty(len(self.order), np.int64)
        self._rank[self.order] = np.arange(len(self.order))
        self._start = np.concatenate([[0], np.cumsum(self._lengths[self.order] - self._shared)])
        self.tokens = int(self._start[-1])

    @classmethod
    def of(cls, sequences: Sequence[Int32[np.ndarray, " length"]]) -> PrefixPlaces:
        """The places of the tokens of these sequences."""
        forest = shared_forest(sequences)
        return cls(forest.order, forest.shared, np.array([len(sequence) for sequence in sequences], np.int64))

    def begin(self, rank: int) -> int:
        """Place of the first token that the solution of this rank in the order adds."""
        return int(self._start[rank])

    def path(self, solution: int) -> Int64[np.ndarray, " length"]:
        """The place of each token of a solution."""
        found = np.empty(self._lengths[solution], np.int64)
        rank, end = int(self._rank[solution]), len(found)
        while end > 0:
            own = int(self._shared[rank])
            if own < end:
                found[own:end] = self._start[rank] + np.arange(end - own)
                end = own
            rank -= 1
        return found

    def digest(self, tokens: Callable[[int], Int32[np.ndarray, " length"]], first: int = 0, end: int = -1) -> str:
        """A hash of the stored tokens of ranks first .. end - 1, and of how their solutions share them.

        Args:
          tokens: the tokens of a solution.
          end: -1 is all.
        """
        digest = hashlib.sha256()
        for rank in range(first, len(self.order) if end < 0 else end):
            solution, shared = int(self.order[rank]), int(self._shared[rank])
            own = tokens(solution)[shared:]
            digest.update(np.array([shared, len(own)], "<i8").tobytes() + own.astype("<i4").tobytes())
        return digest.hexdigest()[:32]


def path_columns(
    subtree_end: Int32[np.ndarray, "rows length"], last_step: int
) -> tuple[int, Int64[np.ndarray, " length"]]:
    """The row of a solution, and the columns of its tokens up to one of its steps.

    Args:
      subtree_end: of the rows of a batch.
      last_step: row * length + column of the step's marker.
    """
    row, column = divmod(int(last_step), subtree_end.shape[1])
    # A token is on the path to those of its subtree.
    return row, np.flatnonzero(subtree_end[row, : column + 1] > column)
