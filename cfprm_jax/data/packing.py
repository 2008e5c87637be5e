"""The one row format that training and scoring compute on: rows that hold a forest of token trees each.

A row lists its trees in depth-first order, every distinct prefix once and the deepest branch of each node first. With
subtree_end[j] the place where the subtree of token j ends, token i sees token j iff j <= i < subtree_end[j], and its
position is its depth. This single rule is the causal mask, the isolation of what happens to share a row, and the
sharing of prefixes; a sequence alone is the tree without branches. So the three packings differ in how sequences are
laid out, never in what the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32, Int64

from cfprm_jax.data.distinct import DistinctSteps
from cfprm_jax.data.partition import Forest, longest_first, separate_forest, shared_forest
from cfprm_jax.data.row_shapes import RowShapes, place_rows
from cfprm_jax.errors import UserError

if TYPE_CHECKING:  # transformers and its tokenizers, which take seconds and which a compiled step has no use for
    from cfprm_jax.data.encoding import Encoded

Array = np.ndarray | jax.Array


class PackedBatch(NamedTuple):
    """Rows of tokens and where each trajectory's steps are read. NumPy on the host, jax.Array inside jit.

    Attributes:
      tokens: token ids, 0 in the padding at the end of a row.
      positions: depth of each token in its tree, which is its rotary position; 0 in the padding.
      subtree_end: token i of a row sees token j iff j <= i < subtree_end[j]; i + 1 in the padding.
      step_positions: row * length + column of each step's marker, trajectories in the order given; 0 where padded.
      labels: label of each step, NaN where padded or unlabelled.
      distinct: which steps are one, and which trajectories answer one question. A loader always gives it; only what is
        over distinct steps or questions reads it.
      redundancy: the second target of each step that counts, NaN elsewhere; None in a run without a redundancy output.
      hidden: the residual stream after the frozen layers, where it is cached (:mod:`.trunk_cache`); 0 in the padding.
    """

    tokens: Int32[Array, "rows length"]
    positions: Int32[Array, "rows length"]
    subtree_end: Int32[Array, "rows length"]
    step_positions: Int32[Array, "trajectories steps"]
    labels: Float32[Array, "trajectories steps"]
    distinct: DistinctSteps | None = None
    redundancy: Float32[Array, "trajectories steps"] | None = None
    hidden: Float[Array, "rows length embed"] | None = None


def forest_of(encoded: Sequence[Encoded], packing: str) -> Forest:
    """The forest of the sequences that have a step to read; those without are left out of every row."""
    sequences = [solution.tokens for solution in encoded if len(solution.step_positions)]
    return shared_forest(sequences) if packing == "tree" else separate_forest(sequences)


def pack(encoded: Sequence[Encoded], packing: str, shapes: RowShapes, trajectories: int, steps: int) -> PackedBatch:
    """All sequences in the rows of the cheapest shape that holds them.

    Every trajectory lies wholly in one row; a tree that does not fit into one is cut at branches and repeats the path
    from its root. A solution without steps has nothing to read and takes no room; its outputs are padding.

    Args:
      encoded: the solutions; output trajectory i is encoded[i].
      packing: "tree" shares common prefixes, "sequence" packs without sharing, "none" puts each in a row of its own.
      shapes: the (rows, length) to choose from.
      trajectories, steps: the padded dimensions of step_positions and labels.

    Raises:
      UserError: a sequence is longer than the longest row; more solutions, or more steps in one, than the shape has
        places for; or more tokens than the largest shape holds.
    """
    most = max((len(solution.step_positions) for solution in encoded), default=0)
    if len(encoded) > trajectories or most > steps:
        raise UserError(
            f"{len(encoded)} solutions of up to {most} steps do not fit into a batch of {trajectories} by {steps}"
        )
    forest = forest_of(encoded, packing)
    if packing == "none":
        shape, division = _one_a_row(forest, shapes)
    else:
        shape, division = place_rows(forest, shapes)
    kept = [i for i, solution in enumerate(encoded) if len(solution.step_positions)]
    batch = _empty(*shape, trajectories, steps)
    for row, places in enumerate(division):
        # Least common prefix over the places skipped: what a sequence shares with the one before it in this row.
        shared = np.zeros(0, np.int64)
        if len(places) > 1:
            shared = np.minimum.reduceat(forest.shared[: places[-1] + 1], places[:-1] + 1)
        order, shared = longest_first(forest.lengths[places], shared)
        solutions = [kept[i] for i in forest.order[places[order]]]
        _write_row(batch, row, [encoded[i] for i in solutions], solutions, shared)
    return batch


def tokens_placed(batch: PackedBatch) -> int:
    """Tokens in the rows without the padding: sequences end with a marker, and rows with a sequence."""
    rows, length = batch.tokens.shape
    last = np.zeros(rows, np.int64)
    row, column = np.divmod(np.asarray(batch.step_positions), length)
    np.maximum.at(last, row.ravel(), column.ravel())
    # A row without sequences has no step but the padded ones at column 0, where none ends: a prompt comes first.
    return int((last + (last > 0)).sum())


def _one_a_row(forest: Forest, shapes: RowShapes) -> tuple[tuple[int, int], list[Int64[np.ndarray, " sequences"]]]:
    for rows, length in shapes.all():
        if rows >= len(forest.order) and length >= forest.longest:
            return (rows, length), [np.array([place]) for place in range(len(forest.order))]
    raise UserError(
        f"{len(forest.order)} sequences of up to {forest.longest} tokens, one a row, fit none of the row shapes "
        f"{shapes.all()}"
    )


def _empty(rows: int, length: int, trajectories: int, steps: int) -> PackedBatch:
    return PackedBatch(
        tokens=np.zeros((rows, length), np.int32),
        positions=np.zeros((rows, length), np.int32),
        subtree_end=np.tile(np.arange(1, length + 1, dtype=np.int32), (rows, 1)),
        step_positions=np.zeros((trajectories, steps), np.int32),
        labels=np.full((trajectories, steps), np.nan, np.float32),
    )


def _write_row(
    batch: PackedBatch,
    row: int,
    encoded: Sequence[Encoded],
    outputs: Sequence[int],
    shared: Int64[np.ndarray, " sequences-1"],
) -> None:
    """Lay out sequences in depth-first order; shared[k] is what encoded[k + 1] shares with encoded[k]."""
    tokens, positions, ends = batch.tokens[row], batch.positions[row], batch.subtree_end[row]
    first = row * batch.tokens.shape[1]
    # Column of the token at each depth of the current root-to-leaf path.
    path = np.zeros(max(len(solution.tokens) for solution in encoded), np.int64)
    depth, column = 0, 0
    for solution, output, common in zip(encoded, outputs, [0, *shared.tolist()], strict=True):
        # What lies deeper on the path than the branch has no further descendants.
        ends[path[common:depth]] = column
        depth = len(solution.tokens)
        new = slice(column, column + depth - common)
        tokens[new] = solution.tokens[common:]
        positions[new] = np.arange(common, depth)
        path[common:depth] = np.arange(new.start, new.stop)
        column = new.stop
        steps = len(solution.step_positions)
        batch.step_positions[output, :steps] = first + path[solution.step_positions]
        batch.labels[output, :steps] = solution.labels
    ends[path[:depth]] = column
