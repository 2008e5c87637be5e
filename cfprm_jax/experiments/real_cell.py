"""One cell of --grid=real: a run of train kept in memory, and what it scores on the evaluation sets.

Training and scoring share one cache of the frozen layers' output. All cells share what is compiled, and how the
evaluation sets lie in rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import transformers
from jax.sharding import Mesh

from cfprm_jax.checkpoints import frozen
from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.evaluation import aggregation
from cfprm_jax.experiments import cell
from cfprm_jax.experiments.cell import every_n, first_n
from cfprm_jax.experiments.real_data import EvaluationSets, located
from cfprm_jax.inference import trunk
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.scorer import Plan, Scorer, Scores
from cfprm_jax.inference.trunk import CachedTrunk, TrunkComputation
from cfprm_jax.run.inputs import Network, Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime.progress import duration

# Rows of a batch on CPU, as in run.trunk.
_CPU_ROWS, _ROWS = 1, 8


@dataclasses.dataclass(frozen=True, eq=False)
class RealOutcome:
    """What a cell found.

    Attributes:
      steps, tokens, final_loss, digest: as of :class:`~cfprm_jax.experiments.cell.CellOutcome`.
      arrays: "held_out/logits" of every distinct step, "held_out/located" of every record, "pool/AGGREGATION/SUBSETS"
        [questions, n], and "process_bench/SUBSET" of every solution; as far as the sets were given.
      train_seconds, evaluation_seconds: wall time.
    """

    steps: int
    tokens: int
    final_loss: float
    digest: str
    arrays: dict[str, np.ndarray]
    train_seconds: float
    evaluation_seconds: float


class RealBench:
    """Runs cells, one after another, and keeps what they share."""

    def __init__(
        self,
        base: TrainConfig,
        network: Network,
        sources: Sources,
        tokenizer: transformers.PreTrainedTokenizerBase,
        sets: EvaluationSets,
        *,
        mesh: Mesh,
        log: Callable[[str], None],
    ) -> None:
        """A bench of one trunk.

        Args:
          base: options that all cells share.

        Raises:
          UserError: the cache is that of something else, or damaged.
        """
        self._sets, self._mesh, self._log = sets, mesh, log
        self._partition = network.partition
        cached = None
        if self._partition.cached:
            cache = trunk.open_cache(base.frozen.cache_frozen, self._partition, sources.model, tokenizer)
            load = lambda: trunk.load_trunk(self._partition, sources.model, mesh)  # noqa: E731
            cached = CachedTrunk(TrunkComputation(self._partition, load, mesh), cache)
        self._trunk = cached
        self._frozen: Any = {}
        if self._partition.frozen:
            self._frozen = frozen.load(network.config, self._partition.frozen, sources.model, base.model.dtype, mesh)
        scoring = dataclasses.replace(network.config, remat="none")
        rows = _CPU_ROWS if mesh.devices.flat[0].platform == "cpu" else _ROWS
        self._scorer = Scorer(
            LoadedPRM(scoring, {}, tokenizer, base.encoding, {}), batch_rows=rows, mesh=mesh, trunk=cached
        )
        self._plans: dict[str, Plan] = {}

    def prepare(self) -> None:
        """Compute what the cache lacks of the evaluation sets."""
        for name, items in self._sets.items.items():
            plan = self._plans[name] = self._scorer.plan(items)
            unscored = len(items) - sum(len(batch.members) for batch in plan.batches)
            if unscored:
                self._log(f"not scored  {unscored:,} solutions of {name}: without steps, or over --max_length")
            if self._trunk is None:
                continue
            started = time.monotonic()
            missing = set(self._trunk.cache.missing(unit.key for unit in plan.units))
            tokens = sum({unit.key: unit.places.tokens for unit in plan.units if unit.key in missing}.values())
            if tokens:
                self._trunk.cache.require_room(tokens)
                self._log(
                    f"frozen      computing {self._trunk.layers} layers of {tokens:,} distinct tokens of {name} once"
                )
            self._trunk.verify(unit.key for unit in plan.units)
            self._trunk.fill(plan.batches, plan.units)
            self._trunk.store()
            if tokens:
                self._log(f"frozen      {tokens:,} tokens in {duration(time.monotonic() - started)}")
        if self._trunk is not None:
            self._trunk.free()

    def run(self, config: TrainConfig, sizes: Sequence[int]) -> RealOutcome:
        """Train as the train command would, then score all sets.

        Args:
          sizes: the n of Best-of-N.

        Raises:
          UserError: what the command raises, or a loss that is not finite.
        """
        started = time.monotonic()
        made = cell.train(config, self._mesh)
        trained = time.monotonic()
        scorer = self._scorer.with_params(self._partition.join(self._frozen, made.params))
        arrays: dict[str, np.ndarray] = {}
        for name, plan in self._plans.items():
            arrays |= self._measured(name, scorer.start(plan).scores(), sizes)
        return RealOutcome(
            steps=made.setup.num_steps,
            tokens=made.tokens,
            final_loss=made.final_loss,
            digest=cell.digest(made.params),
            arrays=arrays,
            train_seconds=trained - started,
            evaluation_seconds=time.monotonic() - trained,
        )

    def _measured(self, name: str, scores: Scores, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        sets = self._sets
        if name == "held_out" and sets.held_out is not None:
            return {
                "held_out/logits": sets.held_out.logits(scores).astype(np.float32),
                "held_out/located": sets.held_out.located(scores),
            }
        if name == "pool" and sets.pool is not None:
            out = {}
            for aggregated in AGGREGATIONS:
                rank = aggregation.rank(scores, aggregated).reshape(sets.pool.correct.shape)
                out[f"pool/{aggregated}/all"] = every_n(rank, sets.pool.correct, sizes)
                out[f"pool/{aggregated}/first"] = first_n(rank, sets.pool.correct, sizes)
            return out
        subset = next(one for one in sets.process_bench if f"process_bench/{one.name}" == name)
        return {name: located(scores, subset.label)}
