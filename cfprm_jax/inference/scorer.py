"""Step scores of many solutions, in the order given: packed as prefix trees, in a small fixed set of row shapes.

The candidates of a question share their prompt and often their first steps, so that a tree of them holds a third fewer
tokens than they have. Trees fill rows of one length; a batch has 1, 2, 4, ... such rows up to a fixed number. So the
forward pass compiles once for each of these counts, whatever the solutions are. Steps are read out of the rows on the
host, which keeps their number out of what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32

from cfprm_jax.data.encoding import Encoded, Encoder
from cfprm_jax.data.packing import PackedBatch, pack
from cfprm_jax.data.partition import common_prefix, depth_first
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.errors import UserError
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.qwen2 import unconstrained
from cfprm_jax.training import sharding
from cfprm_jax.training.checkpoint import LoadedPRM

Item = tuple[str, Sequence[str]]
"""A question and the steps of one solution."""

# Share of a full batch's tokens that solutions are collected up to; trees seldom fill rows to the end.
_FILL = 0.9


class _Pending(NamedTuple):
    """A batch that is being computed."""

    members: list[int]
    positions: list[Int32[np.ndarray, " steps"]]
    z: jax.Array

    def read_into(self, scores: list[Float32[np.ndarray, " steps"] | None]) -> None:
        """Wait for it, and put its solutions' logits where they belong."""
        flat = np.asarray(self.z, np.float32).reshape(-1)
        for i, where in zip(self.members, self.positions, strict=True):
            scores[i] = flat[where]


class Scorer:
    """Scores solutions with one PRM. Not for several threads at once.

    Attributes:
      encoder: how questions and steps become tokens; its split cuts a text into steps.
      shapes: the (rows, length) that batches may have.
      compilations: how many of them the forward pass has been compiled for.
    """

    def __init__(
        self,
        loaded: LoadedPRM,
        packing: str = "tree",
        batch_rows: int = 8,
        row_length: int = 0,
        mesh: Mesh | None = None,
    ) -> None:
        """A scorer for a PRM whose parameters are where the mesh wants them.

        Args:
          packing: "tree", "sequence" or "none", which give the same scores; trees compute least.
          batch_rows: most rows of a batch, rounded up to what the mesh splits evenly.
          row_length: tokens of a row; 0 takes the model's max_length rounded up to a multiple of 128.
          mesh: rows are split over its data and fsdp axes; None is one device.

        Raises:
          UserError: rows shorter than the model's max_length.
        """
        self._loaded = loaded
        self._packing = packing
        self.encoder = Encoder(loaded.tokenizer, loaded.encoding)
        length = row_length or -(-loaded.encoding.max_length // 128) * 128
        if length < loaded.encoding.max_length:
            raise UserError(
                f"--row_length={length} is shorter than the model's max_length={loaded.encoding.max_length}"
            )
        multiple = 1 if mesh is None else sharding.row_multiple(mesh)
        self.shapes = RowShapes.covering((length,), batch_rows, multiple)
        self.compilations = 0
        self._rows = None if mesh is None else NamedSharding(mesh, PartitionSpec(sharding.ROW_AXES))
        constrain = unconstrained if mesh is None else sharding.constrain_activations(mesh)

        def forward(
            params: Params, tokens: jax.Array, positions: jax.Array, subtree_end: jax.Array
        ) -> Float32[jax.Array, "rows length"]:
            self.compilations += 1  # jit runs this once a shape
            return prm.apply(loaded.config, params, tokens, positions, subtree_end, constrain)

        self._forward = jax.jit(forward, out_shardings=self._rows)

    def score(self, items: Sequence[Item]) -> list[Float32[np.ndarray, " steps"] | None]:
        """The step logits z of every solution, in the order given.

        Solutions that share a prefix should stand in one call: they are computed together as far as a batch holds them.

        Returns:
          float32 [steps] each; None for a solution without steps, or longer than the model's max_length in tokens,
          which is not scored in part.
        """
        encoded = self.encoder.encode_many([(question, steps, None) for question, steps in items])
        whole = [i for i, (_, steps) in enumerate(items) if len(steps) and len(encoded[i].step_positions) == len(steps)]
        scores: list[Float32[np.ndarray, " steps"] | None] = [None] * len(items)
        pending: list[_Pending] = []
        for members, batch in self._batches(encoded, whole):
            positions = [np.asarray(batch.step_positions[k, : len(items[i][1])]) for k, i in enumerate(members)]
            pending.append(_Pending(members, positions, self._compute(batch)))
            # The device works on one batch while the host packs the next.
            if len(pending) > 1:
                pending.pop(0).read_into(scores)
        for done in pending:
            done.read_into(scores)
        return scores

    def _compute(self, batch: PackedBatch) -> jax.Array:
        rows = (batch.tokens, batch.positions, batch.subtree_end)
        if self._rows is not None:
            rows = jax.device_put(rows, self._rows)
        return self._forward(self._loaded.params, *rows)

    def _batches(self, encoded: Sequence[Encoded], members: Sequence[int]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Batches, each with the solutions that are in it; those with long common prefixes are neighbours."""
        rows, length = self.shapes.all()[-1]
        room = _FILL * rows * length
        waiting: list[int] = []
        used, before = 0.0, np.zeros(0, np.int32)
        for i in (members[k] for k in depth_first([encoded[i].tokens for i in members])):
            tokens = encoded[i].tokens
            alone = length if self._packing == "none" else len(tokens)
            cost = alone - common_prefix(before, tokens) if self._packing == "tree" else alone
            if waiting and used + cost > room:
                yield from self._packed(encoded, waiting)
                waiting, used, cost = [], 0.0, alone
            waiting.append(i)
            used, before = used + cost, tokens
        if waiting:
            yield from self._packed(encoded, waiting)

    def _packed(self, encoded: Sequence[Encoded], members: list[int]) -> Iterator[tuple[list[int], PackedBatch]]:
        """One batch, or two or more where rows have no room for what the prefixes repeat."""
        solutions = [encoded[i] for i in members]
        steps = max(len(solution.step_positions) for solution in solutions)
        try:
            batch = pack(solutions, self._packing, self.shapes, len(members), steps)
        except UserError:
            # One solution always fits: no row is shorter than the model's max_length.
            if len(members) == 1:
                raise
            half = len(members) // 2
            yield from self._packed(encoded, members[:half])
            yield from self._packed(encoded, members[half:])
        else:
            yield members, batch
