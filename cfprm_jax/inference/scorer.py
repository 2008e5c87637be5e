"""Step scores of many solutions, in the order given: packed as prefix trees, in a small fixed set of row shapes.

The candidates of a question share their prompt and often their first steps, so that a tree of them holds a quarter
fewer tokens than they have. All that is to be scored together is first divided into rows of a few lengths, as they cost
least: a longer row repeats less of what is shared, and costs more in attention. Rows of one length then make batches of
1, 2, 4, ... up to a fixed number of them, so that no batch has an empty row. The forward pass compiles once for each
shape, whatever the solutions are. Steps are read out of the rows on the host, which keeps their number out of what is
compiled.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import forest_of, pack
from cfprm_jax.data.partition import common_prefix
from cfprm_jax.data.row_shapes import QUANTUM, RowShapes
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings import make_encoder
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.placement import unconstrained
from cfprm_jax.sharding import rules

Item = tuple[str, Sequence[str]]
"""A question and the steps of one solution."""

Scores = list[Float32[np.ndarray, " steps"] | None]
"""The step logits of each solution; None where there are none."""

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


class Plan(NamedTuple):
    """The batches for a number of solutions."""

    solutions: int
    batches: list[ScoringBatch]


class Computation(NamedTuple):
    """A plan whose batches the device works on."""

    plan: Plan
    z: list[jax.Array]

    def scores(self) -> Scores:
        """Wait for it; the step logits of each solution."""
        return [None if found is None else found[:, 0] for found in self.outputs()]

    def outputs(self) -> list[Float32[np.ndarray, "steps outputs"] | None]:
        """Wait for it; the step logits of each solution, and beside them the logits of redundancy if there are any."""
        found: list[Float32[np.ndarray, "steps outputs"] | None] = [None] * self.plan.solutions
        for batch, z in zip(self.plan.batches, self.z, strict=True):
            rows, length, *_ = z.shape
            flat = np.asarray(z, np.float32).reshape(rows * length, -1)
            for i, where in zip(batch.members, batch.steps, strict=True):
                found[i] = flat[where]
        return found


class Scorer:
    """Scores solutions with one PRM. Not for several threads at once.

    Attributes:
      encoder: how questions and steps become tokens; its split cuts a text into steps.
      shapes: the (rows, length) that batches may have.
      compilations: how many of them the forward pass has been compiled for.
      redundancy: whether the PRM has a redundancy output.
    """

    def __init__(
        self,
        loaded: LoadedPRM,
        packing: str = "tree",
        batch_rows: int = 8,
        row_length: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        """Creates a scorer for a PRM whose parameters are sharded over the mesh.

        Args:
          packing: "tree", "sequence" or "none". Scores are the same; "tree" computes the fewest tokens.
          batch_rows: maximum number of rows of a batch, rounded up to a multiple that the mesh divides.
          row_length: tokens per row; 0 selects about the width of the network, more for longer solutions, less for a
            row that is not filled.
          mesh: rows are sharded over its data and fsdp axes; None is a single device.

        Raises:
          UserError: rows are shorter than the model's max_length.
        """
        self._loaded = loaded
        self._packing = packing
        self.encoder = make_encoder(loaded.encoding_name, loaded.tokenizer, loaded.encoding)
        longest = loaded.encoding.max_length
        if row_length and row_length < longest:
            raise UserError(f"--row_length={row_length} is shorter than the model's max_length={longest}")
        width = loaded.config.backbone.hidden_size
        self._attention = _ATTENTION_WIDTHS * width
        self._lengths = (row_length,) if row_length else _lengths(longest, min(_WIDTHS * width, _LONGEST))
        self._multiple = 1 if mesh is None else rules.row_multiple(mesh)
        self.shapes = RowShapes.covering(self._lengths, batch_rows, self._multiple)
        self.compilations = 0
        self.redundancy = loaded.config.redundancy
        self._sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(rules.ROW_AXES))
        constrain = unconstrained if mesh is None else rules.constrain_activations(mesh)

        def forward(
            params: Params, tokens: jax.Array, positions: jax.Array, subtree_end: jax.Array
        ) -> Float32[jax.Array, "rows length *outputs"]:
            self.compilations += 1  # jit runs this once a shape
            return prm.apply(loaded.config, params, tokens, positions, subtree_end, constrain)

        # Every process reads all scores, which are few.
        everywhere = None if mesh is None else rules.replicated(mesh)
        self._forward = jax.jit(forward, out_shardings=everywhere)

    def with_params(self, params: Params) -> Scorer:
        """The same for other parameters of the same network, laid out alike; nothing is compiled again for them."""
        other = copy.copy(self)
        other._loaded = dataclasses.replace(self._loaded, params=params)
        return other

    def score(self, items: Sequence[Item]) -> Scores:
        """The step logits z of every solution, in the order given.

        Solutions that share a prefix should stand in one call: they are computed together.

        Returns:
          float32 [steps] each; None for a solution without steps, or longer than the model's max_length in tokens,
          which is not scored in part.
        """
        return self.start(self.plan(items)).scores()

    def plan(self, items: Sequence[Item]) -> Plan:
        """The batches for these solutions: all that the host does beforehand. For one thread at a time."""
        encoded = self.encoder.encode_many([(question, steps, None) for question, steps in items])
        whole = [i for i, (_, steps) in enumerate(items) if len(steps) and len(encoded[i].step_positions) == len(steps)]
        rows: dict[int, list[ScoringBatch]] = {}
        for length, members in self._division(encoded, whole):
            rows.setdefault(length, []).append(self._row([encoded[i] for i in members], members, length))
        batches = [batch for _, those in sorted(rows.items()) for batch in self._batches(those)]
        return Plan(len(items), batches)

    def start(self, plan: Plan) -> Computation:
        """Hand all batches of a plan to the device."""
        return Computation(plan, [self._compute(batch) for batch in plan.batches])

    def _compute(self, batch: ScoringBatch) -> jax.Array:
        rows: tuple[Any, ...] = batch.rows
        if self._sharding is not None:
            rows = tuple(jax.make_array_from_callback(x.shape, self._sharding, x.__getitem__) for x in rows)
        return self._forward(self._loaded.params, *rows)

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
