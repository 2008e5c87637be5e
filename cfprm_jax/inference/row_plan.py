"""Solutions in rows: the cheapest division into rows of a few lengths, and batches of a few row counts.

The candidates of a question share their prompt and often their first steps, so that a tree of them holds a quarter
fewer tokens than they have. All that is to be computed together is first divided into rows of a few lengths, as they
cost least: a longer row repeats less of what is shared, and costs more in attention. Rows of one length then make
batches of 1, 2, 4, ... up to a fixed number of them, so that no batch has an empty row.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import forest_of, pack
from cfprm_jax.data.partition import common_prefix
from cfprm_jax.data.row_shapes import QUANTUM, RowShapes
from cfprm_jax.errors import UserError

# Row length, in widths of the network, at which attention costs as much as all else: measured on CPU, where a token of
# the 0.5B model (896 wide) takes a tenth longer in rows of 1024 than in rows of 384, and a quarter longer in 2048.
_ATTENTION_WIDTHS = 8
# Rows beyond the longest solution are made up to this many widths, or tokens: longer ones share hardly more.
_WIDTHS, _LONGEST = 2, 2048


class ScoringBatch(NamedTuple):
    """Rows to compute together.

    Attributes:
      rows: tokens, positions and subtree_end of :class:`~cfprm_jax.data.packing.PackedBatch`.
      members: the solutions in them.
      steps: index row * length + column of each member's markers.
    """

    rows: tuple[Int32[np.ndarray, "rows length"], ...]
    members: list[int]
    steps: list[Int32[np.ndarray, " steps"]]


class RowPlanner:
    """Divides solutions into batches of rows.

    Attributes:
      shapes: the (rows, length) that batches may have.
    """

    def __init__(
        self,
        longest: int,
        width: int,
        packing: str = "tree",
        batch_rows: int = 8,
        *,
        row_length: int = 0,
        multiple: int = 1,
    ) -> None:
        """A planner of rows for solutions of up to a maximum length.

        Args:
          width: of the network.
          packing: "tree", "sequence" or "none"; trees compute least.
          batch_rows: most rows of a batch, rounded up to a multiple.
          row_length: tokens of a row; 0 takes about the width of the network, more for longer solutions, less for what
            fills no row.
          multiple: row counts are multiples of this.

        Raises:
          UserError: rows shorter than the longest solution.
        """
        if row_length and row_length < longest:
            raise UserError(f"--row_length={row_length} is shorter than the model's max_length={longest}")
        self._packing = packing
        self._attention = _ATTENTION_WIDTHS * width
        self._lengths = (row_length,) if row_length else _lengths(longest, min(_WIDTHS * width, _LONGEST))
        self.shapes = RowShapes.covering(self._lengths, batch_rows, multiple)

    def plan(self, encoded: Sequence[Encoded], members: Sequence[int]) -> list[ScoringBatch]:
        """The batches of these members of the solutions; each has a step."""
        rows: dict[int, list[ScoringBatch]] = {}
        for length, those in self._division(encoded, members):
            rows.setdefault(length, []).append(self._row([encoded[i] for i in those], those, length))
        return [batch for _, those in sorted(rows.items()) for batch in self._batches(those)]

    def _division(self, encoded: Sequence[Encoded], members: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(length, solutions) of each row: the cheapest cuts of all solutions in depth-first order."""
        if not members:
            return
        forest = forest_of([encoded[i] for i in members], self._packing)
        order = [members[i] for tree in forest.trees for i in forest.order[tree.members]]
        lengths = [len(encoded[i].tokens) for i in order]
        shared = [0] * len(order)
        if self._packing == "tree":
            shared[1:] = [common_prefix(encoded[a].tokens, encoded[b].tokens) for a, b in itertools.pairwise(order)]
        yield from ((length, order[first:end]) for length, first, end in self._cheapest_cuts(lengths, shared))

    def _cheapest_cuts(self, lengths: Sequence[int], shared: Sequence[int]) -> list[tuple[int, int, int]]:
        """(row length, first, end) of each row.

        Args:
          lengths, shared: tokens of each sequence, and what it has in common with the one before it.
        """
        costs = [length * (1 + length / self._attention) for length in self._lengths]
        # best[k] is the cost of the first k sequences, cut[k] the (row length, first) of their last row.
        best, cut = [0.0], [(0, 0)]
        for end in range(1, len(lengths) + 1):
            found, where, more = math.inf, (0, 0), 0
            for first in range(end - 1, -1, -1):
                size = lengths[first] + more
                if size > self._lengths[-1] or (self._packing == "none" and first < end - 1):
                    break
                index = bisect.bisect_left(self._lengths, size)
                if best[first] + costs[index] < found:
                    found, where = best[first] + costs[index], (self._lengths[index], first)
                more += lengths[first] - shared[first]
            best.append(found)
            cut.append(where)
        rows, end = [], len(lengths)
        while end:
            length, first = cut[end]
            rows.append((length, first, end))
            end = first
        return rows[::-1]

    def _row(self, solutions: Sequence[Encoded], members: list[int], length: int) -> ScoringBatch:
        steps = max(len(solution.step_positions) for solution in solutions)
        packed = pack(solutions, self._packing, RowShapes(((1, length),)), len(solutions), steps)
        places = np.asarray(packed.step_positions)
        return ScoringBatch(
            (packed.tokens, packed.positions, packed.subtree_end),  # type: ignore[arg-type]
            members,
            [places[k, : len(solution.step_positions)] for k, solution in enumerate(solutions)],
        )

    def _batches(self, rows: Sequence[ScoringBatch]) -> Iterator[ScoringBatch]:
        """Rows of one length as batches of the row counts that there are, the largest first."""
        counts = sorted({count for count, _ in self.shapes.all()}, reverse=True)
        done = 0
        while done < len(rows):
            left = len(rows) - done
            count = next((count for count in counts if count <= left), counts[-1])
            yield _joined(rows[done : done + count], count)
            done += count


def _lengths(longest: int, usual: int) -> tuple[int, ...]:
    """128, 256, 384, 512, then every 256, up to the usual row length and to one that holds the longest solution."""
    last = -(-max(longest, usual) // QUANTUM) * QUANTUM
    step = max(2, -(-last // (16 * QUANTUM))) * QUANTUM
    lengths = {n for n in (QUANTUM, 2 * QUANTUM, 3 * QUANTUM, 4 * QUANTUM, *range(4 * QUANTUM, last, step)) if n < last}
    return tuple(sorted({*lengths, last}))


def _joined(rows: Sequence[ScoringBatch], count: int) -> ScoringBatch:
    """Single rows as one batch of count rows, filled up with padding."""
    length = rows[0].rows[0].shape[1]
    empty = np.zeros((count - len(rows), length), np.int32)
    ends = empty + np.arange(1, length + 1, dtype=np.int32)
    arrays = [
        np.concatenate([*(row.rows[k] for row in rows), padding]) for k, padding in enumerate((empty, empty, ends))
    ]
    return ScoringBatch(
        tuple(arrays),
        [i for row in rows for i in row.members],
        [place + number * length for number, row in enumerate(rows) for place in row.steps],
    )
