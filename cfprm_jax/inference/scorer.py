"""Step scores of many solutions, in the order given: packed as prefix trees, in a small fixed set of row shapes.

How solutions lie in rows is :mod:`cfprm_jax.inference.row_plan`. The forward pass compiles once for each shape,
whatever the solutions are. Steps are read out of the rows on the host, which keeps their number out of what is
compiled.

With a cache of the frozen layers (:mod:`cfprm_jax.inference.trunk`) only the layers above them are computed here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32

from cfprm_jax.inference.encodings import make_encoder
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.row_plan import RowPlanner, ScoringBatch
from cfprm_jax.inference.trunk import CachedTrunk, Unit
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.partition import without_trunk
from cfprm_jax.models.placement import unconstrained
from cfprm_jax.runtime import determinism
from cfprm_jax.sharding import rules

Item = tuple[str, Sequence[str]]
"""A question and the steps of one solution."""

Scores = list[Float32[np.ndarray, " steps"] | None]
"""The step logits of each solution; None where there are none."""


class Plan(NamedTuple):
    """The batches for a number of solutions."""

    solutions: int
    batches: list[ScoringBatch]
    units: list[Unit]  # of solutions whose hidden states are cached together; none without a cache


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
        *,
        mesh: Mesh | None = None,
        trunk: CachedTrunk | None = None,
        deterministic: bool = False,
    ) -> None:
        """Creates a scorer for a PRM whose parameters are sharded over the mesh.

        Args:
          packing: "tree", "sequence" or "none". Scores are the same; "tree" computes the fewest tokens.
          batch_rows: maximum number of rows of a batch, rounded up to a multiple that the mesh divides.
          row_length: tokens per row; 0 selects about the width of the network, more for longer solutions, less for a
            row that is not filled.
          mesh: rows are sharded over its data and fsdp axes; None is a single device.
          trunk: computes the lowest layers, or reads their output from a cache; the PRM's parameters may then be those
            above it alone.
          deterministic: compiled to give the same bits every time (:mod:`cfprm_jax.runtime.determinism`).

        Raises:
          UserError: rows are shorter than the model's max_length.
        """
        self._loaded = loaded
        self.encoder = make_encoder(loaded.encoding_name, loaded.tokenizer, loaded.encoding)
        longest, width = loaded.encoding.max_length, loaded.config.backbone.hidden_size
        multiple = 1 if mesh is None else rules.row_multiple(mesh)
        self._planner = RowPlanner(longest, width, packing, batch_rows, row_length=row_length, multiple=multiple)
        self.shapes = self._planner.shapes
        self._trunk = trunk
        if trunk is not None and "embedding" in loaded.params.get("backbone", {}):
            above = without_trunk(loaded.params, trunk.layers)
            self._loaded = dataclasses.replace(loaded, params=above)
        self.compilations = 0
        self.redundancy = loaded.config.redundancy
        self._sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(rules.ROW_AXES))
        constrain = unconstrained if mesh is None else rules.constrain_activations(mesh)

        def forward(
            params: Params,
            tokens: jax.Array,
            positions: jax.Array,
            subtree_end: jax.Array,
            hidden: jax.Array | None = None,
        ) -> Float32[jax.Array, "rows length *outputs"]:
            self.compilations += 1  # jit runs this once a shape
            return prm.apply(loaded.config, params, tokens, positions, subtree_end, constrain=constrain, hidden=hidden)

        # Every process reads all scores, which are few.
        everywhere = None if mesh is None else rules.replicated(mesh)
        platform = (jax.devices()[0] if mesh is None else mesh.devices.flat[0]).platform
        options = determinism.compiler_options(deterministic, platform)
        self._forward = jax.jit(forward, out_shardings=everywhere, compiler_options=options)

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
        units = [] if self._trunk is None else self._trunk.units([item[0] for item in items], encoded, whole)
        return Plan(len(items), self._planner.plan(encoded, whole), units)

    def start(self, plan: Plan) -> Computation:
        """Hand all batches of a plan to the device."""
        if self._trunk is None:
            return Computation(plan, [self._compute(batch.rows) for batch in plan.batches])
        hidden = self._trunk.hidden(plan.batches, plan.units)
        return Computation(plan, [self._compute((*batch.rows, x)) for batch, x in hidden])

    def _compute(self, rows: tuple[Any, ...]) -> jax.Array:
        if self._sharding is not None:
            rows = tuple(jax.make_array_from_callback(x.shape, self._sharding, x.__getitem__) for x in rows)
        return self._forward(self._loaded.params, *rows)
