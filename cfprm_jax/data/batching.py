"""The order of a run's trajectories, and the batch of each step: a pure function of corpus, options and seed.

--batch_size counts trajectories, --batch_tokens the tokens that a step computes (:mod:`.budget`). A run is a sequence
of stages: one per granularity, in the order of --schedule; with "shuffled", a single stage that mixes all of them. A
stage has --epochs_per_granularity passes. A pass visits every trajectory once, in its own order, cut into batches; the
last batch holds the remainder, so that nothing is dropped and stages never share a batch.

The order of a pass:

* sequence, none: trajectories shuffled independently, as in the paper.
* tree with --record_chunk=1: the same order, so that packing changes nothing but what is computed twice.
* tree with --record_chunk=0: records shuffled, and each record's trajectories in depth-first order of their common
  tree; these, end to end, are cut every batch_size trajectories. So whole records are taken until the batch is full,
  and one that is larger than what is left is spread over consecutive steps, each of which repeats only the path to the
  cut. With this rule the first 300 records of PRM800K phase 1 hold 11.4, 13.6, 15.2 and 16.1 times fewer distinct
  tokens than expanded ones at batches of 32, 64, 128 and 256 (17.1 for whole records; distinct within a record and
  step).
* tree with --record_chunk=K: a record is cut into runs of at most K trajectories, and these are shuffled in its place.

With --batch_tokens a run of trajectories is not cut, unless it is larger than a whole step; whole records stay whole.

The shuffle sorts by a hash of (seed, stage, epoch, place) that is written out here, so that it stays the same under
every version of every library. Orders are arrays of integers: a million trajectories take 8 MB and a tenth of a second.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from cfprm_jax.config import Granularity, GranularityConfig
from cfprm_jax.data import budget
from cfprm_jax.data.corpus import Corpus

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# Reading threads stand in at most two passes at once; one more serves a look back.
_PASSES_KEPT = 3


@dataclasses.dataclass(frozen=True)
class Pass:
    """One visit of every trajectory of a stage.

    Attributes:
      stage, epoch: which, from 0.
      granularities: the granularities that it mixes; one unless --schedule=shuffled.
      trajectories: how many it visits.
      first_step: optimizer steps of the run before it.
    """

    stage: int
    epoch: int
    granularities: tuple[Granularity, ...]
    trajectories: int
    first_step: int


class BatchPlan:
    """The trajectories of each step of a run.

    Attributes:
      passes: in the order of the run.
      num_steps: of the run.
      trajectories: most of them in a step.
    """

    def __init__(
        self,
        corpus: Corpus,
        granularities: GranularityConfig,
        packing: str,
        batch_size: int,
        *,
        seed: int,
        record_chunk: int,
        batch_tokens: int = 0,
    ) -> None:
        self._corpus = corpus
        self._shares = packing == "tree"
        self._by_record = packing == "tree" and record_chunk != 1
        self._chunk = record_chunk
        self._seed = seed
        self._orders: dict[int, Int64[np.ndarray, " trajectories"]] = {}
        self._lock = threading.Lock()
        self.passes: list[Pass] = []
        self._bounds: list[Int64[np.ndarray, " batches+1"]] = []
        step = 0
        for stage, mixed in enumerate(stages(granularities)):
            total = sum(corpus.num_trajectories(granularity) for granularity in mixed)
            costs = self._costs(mixed) if batch_tokens else None
            for epoch in range(granularities.epochs_per_granularity):
                self.passes.append(Pass(stage, epoch, mixed, total, step))
                if costs is None:
                    self._bounds.append(np.append(np.arange(0, total, batch_size), total))
                else:
                    self._bounds.append(self._cut(self.passes[-1], costs, batch_tokens))
                step += len(self._bounds[-1]) - 1
        self.num_steps = step
        self.trajectories = max(int(np.diff(bounds).max(initial=1)) for bounds in self._bounds)
        if not batch_tokens:
            self.trajectories = batch_size
        self._first_steps = np.array([p.first_step for p in self.passes])

    def batch(self, step: int) -> tuple[Pass, list[tuple[Granularity, int]]]:
        """The pass that a step belongs to, and its trajectories as (granularity, place in the corpus).

        Raises:
          IndexError: the run has no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        number = int(np.searchsorted(self._first_steps, step, side="right")) - 1
        this = self.passes[number]
        begin, end = self._bounds[number][step - this.first_step :][:2]
        places = self._order(number)[begin:end]
        starts = np.cumsum([0, *(self._corpus.num_trajectories(g) for g in this.granularities)])
        which = np.searchsorted(starts, places, side="right") - 1
        return this, [(this.granularities[w], int(p - starts[w])) for w, p in zip(which, places, strict=True)]

    def _order(self, number: int) -> Int64[np.ndarray, " trajectories"]:
        """The order of a pass: trajectories of its granularities, numbered end to end."""
        with self._lock:
            if number not in self._orders:
                self._orders[number] = self._make_order(self.passes[number])
                while len(self._orders) > _PASSES_KEPT:
                    del self._orders[next(iter(self._orders))]
            return self._orders[number]

    def _make_order(self, this: Pass) -> Int64[np.ndarray, " trajectories"]:
        if not self._by_record:
            return shuffled(this.trajectories, self._seed, this.stage, this.epoch)
        begins, lengths = self._units(this)
        # Places of the shuffled records' trajectories: each record's first place, and 0, 1, ... within it.
        within = np.arange(this.trajectories) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return self._depth_first(this.granularities)[np.repeat(begins, lengths) + within]

    def _units(self, this: Pass) -> tuple[Int64[np.ndarray, " units"], Int64[np.ndarray, " units"]]:
        """The units of a pass by records, in its order: their begins in depth-first order, and their sizes."""
        starts, before = [], 0
        for granularity in this.granularities:
            reader = self._corpus[granularity]
            starts.append(_chunks(np.asarray(reader.record_starts), self._chunk) + before)
            before += len(reader)
        begins = np.concatenate(starts)
        order = shuffled(len(begins), self._seed, this.stage, this.epoch)
        return begins[order], np.diff(begins, append=before)[order]

    def _depth_first(self, granularities: Sequence[Granularity]) -> Int64[np.ndarray, " trajectories"]:
        """Trajectories numbered end to end over the granularities, those of each record in depth-first order."""
        before = np.cumsum([0, *(self._corpus.num_trajectories(g) for g in granularities)])
        return np.concatenate([self._corpus[g].order + n for g, n in zip(granularities, before, strict=False)])

    def _costs(self, granularities: Sequence[Granularity]) -> budget.Costs:
        readers = [self._corpus[granularity] for granularity in granularities]
        lengths = np.concatenate([np.asarray(reader.lengths)[reader.order] for reader in readers])
        shared = np.concatenate([np.asarray(reader.shared) for reader in readers])
        return budget.Costs(lengths, shared if self._shares else np.zeros_like(shared))

    def _cut(self, this: Pass, costs: budget.Costs, tokens: int) -> Int64[np.ndarray, " batches+1"]:
        order = self._order(len(self.passes) - 1)
        place = np.empty_like(order)
        place[self._depth_first(this.granularities)] = np.arange(len(order))
        units = self._units(this)[1] if self._by_record else np.ones_like(order)
        return budget.cut(place[order], units, costs, tokens)


def _chunks(starts: Int64[np.ndarray, " records+1"], most: int) -> Int64[np.ndarray, " chunks"]:
    """Where runs of at most `most` trajectories of one record begin; 0 keeps records whole."""
    if not most:
        return starts[:-1]
    counts = -(-np.diff(starts) // most)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts[:-1], counts) + within * most


def stages(granularities: GranularityConfig) -> Sequence[tuple[Granularity, ...]]:
    """The granularities of each stage, in the order of the run."""
    if granularities.schedule == "shuffled":
        return [granularities.stages]
    order = granularities.stages
    return [(g,) for g in (reversed(order) if granularities.schedule == "fine_to_coarse" else order)]


def shuffled(count: int, *keys: int) -> Int64[np.ndarray, " count"]:
    """The numbers below count in an order that the keys determine: sorted by SplitMix64 of their places.

    SplitMix64 is Steele, Lea and Flood's generator (OOPSLA 2014); distinct places have distinct hashes, so there are no
    ties.
    """
    state = 0
    for key in keys:
        state = _mix(state + _GOLDEN + key)
    places = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(state)
    places = (places ^ (places >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    places = (places ^ (places >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(places ^ (places >> np.uint64(31)), kind="stable")


def _mix(value: int) -> int:
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
