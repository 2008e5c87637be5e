"""Batches of a run: batch k is a pure function of (corpus fingerprint, options, seed, k).

So the same batches come on one process and on eight, with any number of reading threads, and after any resume, whose
whole state is the number of the next batch. Every process makes the global batch and takes the rows of its own devices
from it; making one takes a small fraction of what a device needs for it.

Reading ahead is Grain's, with threads: worker processes would tie the order of the data to their number.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import grain
import numpy as np
from jaxtyping import Float, Float32

from cfprm_jax.config import EncodingConfig, Granularity, GranularityConfig, PackingConfig
from cfprm_jax.data.batching import BatchPlan, shuffled, stages
from cfprm_jax.data.corpus import CONTENT, Corpus
from cfprm_jax.data.corpus_files import GranularityReader
from cfprm_jax.data.distinct import distinct_redundancy, distinct_steps, padded
from cfprm_jax.data.packing import PackedBatch, forest_of, pack, tokens_placed
from cfprm_jax.data.row_shapes import RowShapes, fit_shapes

if TYPE_CHECKING:  # transformers, which takes seconds
    from cfprm_jax.data.encoding import Encoded

REDUNDANCY = ("", "trajectory", "node")
"""Second targets of a batch: none, one per step of every trajectory, or one per distinct step."""

MIXED = "mixed"
"""Granularity of a batch under --schedule=shuffled."""

# Batches that row shapes are fitted to: enough that what they miss is rare, few enough to take about a second.
_SAMPLED_BATCHES = (64, 384)
_SAMPLED_TRAJECTORIES = 16384
_THREADS = 2
_READ_AHEAD = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """One step's data.

    Attributes:
      packed: the rows, and where the steps of trajectory i are read; the trajectories of the step, then padding.
      granularity: of all its trajectories, or "mixed".
      epoch, stage: which pass of which stage, from 0.
      sources: the record of each trajectory.
      trajectories: how many there are, without padding.
      tokens_expanded: tokens of all trajectories, each counted whole.
      tokens_computed: tokens in the rows, without padding: what is computed once prefixes are shared.
      distinct_labels: of held-out batches, the labels of DistinctSteps over all of them together.
    """

    packed: PackedBatch
    granularity: Granularity
    epoch: int
    stage: int
    sources: tuple[str, ...]
    trajectories: int
    tokens_expanded: int
    tokens_computed: int
    distinct_labels: Float32[np.ndarray, "trajectories steps"] | None = None


class HiddenStates(Protocol):
    """The output of frozen layers, computed beforehand."""

    def prepare(self, reader: GranularityReader, trajectories: Sequence[int] | None = None) -> None:
        """Compute what is missing for these trajectories, by default all."""
        ...

    def __call__(
        self, members: Sequence[tuple[GranularityReader, int]], encoded: Sequence[Encoded], packed: PackedBatch
    ) -> Float[np.ndarray, "rows length width"]:
        """The hidden states of the rows of a batch, 0 in the padding."""
        ...


class Loader:
    """The batches of a training run, by number.

    Attributes:
      num_steps: how many there are.
      trajectories: most of them in a batch; all batches are padded to as many.
      fingerprint: all that the batches depend on, option by option.
      shapes: of their rows.
    """

    def __init__(
        self,
        corpus: Corpus,
        granularities: GranularityConfig,
        packing: PackingConfig,
        encoding: EncodingConfig,
        *,
        seed: int,
        row_multiple: int = 1,
        redundancy: str = "",
        hidden: HiddenStates | None = None,
    ) -> None:
        """Plans the run; the only batches made here are the sample that its row shapes are fitted to.

        Args:
          row_multiple: row counts are multiples of this: the number of devices that rows are sharded over. It changes
            how a batch lies in rows, never which trajectories it holds.
          redundancy: one of REDUNDANCY.
          hidden: batches get their hidden states from it; all else is as without.
        """
        self._corpus = corpus
        self._hidden = hidden
        self._redundancy = redundancy
        self._packing = packing
        self._plan = BatchPlan(
            corpus,
            granularities,
            packing.packing,
            packing.batch_size,
            seed=seed,
            record_chunk=packing.record_chunk,
            batch_tokens=packing.batch_tokens,
        )
        self.num_steps = self._plan.num_steps
        self.trajectories = self._plan.trajectories
        self.fingerprint: dict[str, Any] = {
            **corpus.identity,
            **dataclasses.asdict(encoding),
            "granularities": [",".join(map(str, stage)) for stage in stages(granularities)],
            "schedule": granularities.schedule,
            "epochs_per_granularity": granularities.epochs_per_granularity,
            "window_tail": granularities.window_tail,
            "window_stride": granularities.window_stride,
            "packing": packing.packing,
            "record_chunk": packing.record_chunk,
            "row_length": packing.row_length,
            "row_shapes": packing.row_shapes,
            **({"batch_tokens": packing.batch_tokens} if packing.batch_tokens else {"batch_size": packing.batch_size}),
            "seed": seed,
            **({"redundancy": redundancy} if redundancy else {}),
        }
        readers = [corpus[granularity] for stage in stages(granularities) for granularity in stage]
        self._steps = max(reader.max_steps for reader in readers)
        self.shapes = self._fit_shapes(max(reader.max_tokens for reader in readers), row_multiple)

    def batch(self, step: int) -> Batch:
        """Batch number step of the run, from 0.

        Raises:
          IndexError: the run has no such step.
        """
        this, members = self._plan.batch(step)
        granularity = this.granularities[0] if len(this.granularities) == 1 else MIXED
        readers = [(self._corpus[g], place) for g, place in members]
        size = self.trajectories
        return _make_batch(
            readers,
            self._packing,
            self.shapes,
            trajectories=size,
            steps=self._steps,
            granularity=granularity,
            epoch=this.epoch,
            stage=this.stage,
            redundancy=self._redundancy,
            hidden=self._hidden,
        )

    def iterator(self, threads: int = _THREADS, read_ahead: int = _READ_AHEAD) -> grain.DatasetIterator[Batch]:
        """All batches in order, made ahead by threads. get_state() and set_state() hold the number of the next one.

        Neither argument changes the batches.
        """
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=read_ahead)
        return iter(grain.MapDataset.source(_Source(self)).to_iter_dataset(options))

    def _fit_shapes(self, longest: int, row_multiple: int) -> RowShapes:
        low, high = _SAMPLED_BATCHES
        size = self.trajectories
        count = min(self.num_steps, max(low, min(high, _SAMPLED_TRAJECTORIES // size)))
        steps = [index * self.num_steps // count for index in range(count)]
        batches = ([self._corpus[g][place] for g, place in self._plan.batch(step)[1]] for step in steps)
        forests = [forest_of(encoded, self._packing.packing) for encoded in batches]
        return fit_shapes(forests, self._packing, longest, size, row_multiple)


class _Source:
    """A loader as the random access source that Grain reads."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.num_steps

    def __getitem__(self, step: int) -> Batch:
        return self._loader.batch(int(step))


def difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Differences between the data of two runs, option by option; None when a run can resume.

    Args:
      saved, current: fingerprints of loaders (:attr:`Loader.fingerprint`); the first may come from JSON.
    """
    saved, current = _files_by_place(saved), _files_by_place(current)
    found = []
    for name in [*saved, *(name for name in current if name not in saved)]:
        before, now = saved.get(name, "nothing"), current.get(name, "nothing")
        if before != now:
            found.append(f"{name} was {_shown(before)} and is {_shown(now)}")
    return "; ".join(found) or None


def _files_by_place(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint of an earlier version, which has the names of files, as today's, which has not: contents decide."""
    if not isinstance(fingerprint.get("files"), list):
        return dict(fingerprint)
    named = {f"content of {name}": CONTENT.format(number) for number, name in enumerate(fingerprint["files"], 1)}
    return {named.get(name, name): value for name, value in fingerprint.items() if name != "files"}


def evaluation_batches(
    corpus: Corpus,
    packing: PackingConfig,
    encoding: EncodingConfig,
    limit: int = 0,
    *,
    row_multiple: int = 1,
    redundancy: bool = False,
    hidden: HiddenStates | None = None,
) -> Sequence[Batch]:
    """A held-out corpus in batches, at granularity 1 or the finest there is, in the order of the input.

    Args:
      limit: most trajectories; records are drawn (the same ones every time) until the next would exceed it, the first
        being cut if it must be. 0 takes all.
      encoding: what the corpus was encoded with.
      redundancy: the batches have second targets: of each distinct step of all batches, once.
      hidden: batches get their hidden states from it, each time that they are taken out of the sequence.
    """
    reader = corpus[corpus.granularities[0]]
    places = np.arange(len(reader))
    if limit and limit < len(reader):
        starts = reader.record_starts
        drawn = shuffled(len(starts) - 1)
        fits = np.cumsum(np.diff(starts)[drawn]) <= limit
        records = np.sort(drawn[: max(int(fits.argmin()), 1)])
        places = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in records])[:limit]
    size = packing.batch_size
    groups = [places[begin : begin + size].tolist() for begin in range(0, len(places), size)]
    if not groups:
        return []
    if hidden is not None:
        hidden.prepare(reader, places.tolist())
    encoded = [[reader[place] for place in group] for group in groups]
    forests = [forest_of(group, packing.packing) for group in encoded]
    questions = [reader.question(place) for group in groups for place in group]
    # All batches but the last are full, so places in them follow one another.
    every = list(itertools.chain(*encoded))
    distinct = distinct_steps(every, questions, len(groups) * size, reader.max_steps)
    labels = np.asarray(distinct.labels).reshape(len(groups), size, reader.max_steps)
    second = distinct_redundancy(every, np.asarray(distinct.nodes)).reshape(labels.shape) if redundancy else None
    longest = min(reader.max_tokens, encoding.max_length)
    shapes = fit_shapes(forests, packing, longest, size, row_multiple)
    batches = [
        _make_batch(
            [(reader, p) for p in group],
            packing,
            shapes,
            trajectories=size,
            steps=reader.max_steps,
            granularity=reader.granularity,
            epoch=0,
            stage=0,
        )
        for group in groups
    ]
    batches = [
        dataclasses.replace(
            batch,
            distinct_labels=labels[number],
            packed=batch.packed if second is None else batch.packed._replace(redundancy=second[number]),
        )
        for number, batch in enumerate(batches)
    ]
    return batches if hidden is None else _WithHidden(batches, reader, groups, hidden)


def without_hidden(batches: Sequence[Batch]) -> Sequence[Batch]:
    """The same batches for those who need no hidden states, which are then not read."""
    return batches.without_hidden if isinstance(batches, _WithHidden) else batches


def held_out_labels(batches: Sequence[Batch], distinct: bool = False) -> Float32[np.ndarray, " labels"]:
    """The labels of the steps of all batches, those that are not labelled left out.

    Args:
      distinct: each distinct step once, with the mean of its labels.
    """
    labels = [
        np.asarray(batch.distinct_labels if distinct else batch.packed.labels).ravel()
        for batch in without_hidden(batches)
    ]
    found = np.concatenate(labels) if labels else np.zeros(0, np.float32)
    return found[~np.isnan(found)]


class _WithHidden(Sequence[Batch]):
    """Batches whose hidden states are read when they are taken: those of all together may be larger than the memory."""

    def __init__(
        self, batches: list[Batch], reader: GranularityReader, groups: list[list[int]], hidden: HiddenStates
    ) -> None:
        self.without_hidden, self._reader, self._groups, self._hidden = batches, reader, groups, hidden

    def __len__(self) -> int:
        return len(self.without_hidden)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        batch, members = self.without_hidden[number], [(self._reader, place) for place in self._groups[number]]
        encoded = [self._reader[place] for place in self._groups[number]]
        states = self._hidden(members, encoded, batch.packed)
        return dataclasses.replace(batch, packed=batch.packed._replace(hidden=states))


def _make_batch(
    members: Sequence[tuple[GranularityReader, int]],
    packing: PackingConfig,
    shapes: RowShapes,
    *,
    trajectories: int,
    steps: int,
    granularity: Granularity,
    epoch: int,
    stage: int,
    redundancy: str = "",
    hidden: HiddenStates | None = None,
) -> Batch:
    encoded = [reader[place] for reader, place in members]
    packed = pack(encoded, packing.packing, shapes, trajectories, steps)
    questions = [reader.question(place) for reader, place in members]
    distinct = distinct_steps(encoded, questions, trajectories, steps)
    second = None
    if redundancy == "node":
        second = distinct_redundancy(encoded, np.asarray(distinct.nodes))
    elif redundancy:
        second = padded([solution.redundancy for solution in encoded], trajectories, steps)
    states = None if hidden is None else hidden(members, encoded, packed)
    return Batch(
        packed=packed._replace(distinct=distinct, redundancy=second, hidden=states),
        granularity=granularity,
        epoch=epoch,
        stage=stage,
        sources=tuple(reader.source(place) for reader, place in members),
        trajectories=len(members),
        tokens_expanded=sum(len(solution.tokens) for solution in encoded),
        tokens_computed=tokens_placed(packed),
    )


def _shown(value: Any) -> str:
    # The first digits distinguish two hashes. Two paths may differ at their end.
    text = str(value)
    return f"{text[:16]}..." if re.fullmatch("[0-9a-f]{60,}", text) else text
