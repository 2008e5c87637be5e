"""Hidden states of a corpus after the frozen layers: filled once before training, then read batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import transformers
from jax.sharding import Mesh
from jaxtyping import Float, Int64

from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.corpus_files import GranularityReader
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.data.prefix_places import PrefixPlaces, path_columns
from cfprm_jax.inference import trunk
from cfprm_jax.inference.row_plan import RowPlanner
from cfprm_jax.inference.trunk import CachedTrunk, TrunkComputation, Unit
from cfprm_jax.models.partition import Partition
from cfprm_jax.run.inputs import LogLine, Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime.progress import ProgressLine, duration
from cfprm_jax.sharding import rules

# Tokens of the records that are divided into rows together: enough to fill rows.
_TOGETHER = 1 << 14
# Rows of a batch. XLA's float32 products on CPU lose a fifth of their rate from 1,024 tokens to 8,192, whose
# activations no longer fit the caches.
_ROWS, _CPU_ROWS = 8, 1


class _Prepared(NamedTuple):
    """A corpus at one granularity.

    Attributes:
      places: of the tokens of all records, one after another.
      starts: first trajectory of each record, and the number of trajectories.
      keys: of the unit of each record.
      known: of each record, whether its states are in the cache.
    """

    places: PrefixPlaces
    starts: Int64[np.ndarray, " records+1"]
    keys: list[str]
    known: np.ndarray


class CorpusHidden:
    """The hidden states of corpora, by record; what a loader takes them from (HiddenStates)."""

    def __init__(self, cached: CachedTrunk, planner: RowPlanner, log: LogLine) -> None:
        self._cached, self._planner, self._log = cached, planner, log
        self._corpora: dict[int, tuple[GranularityReader, _Prepared]] = {}

    def prepare(self, reader: GranularityReader, trajectories: Sequence[int] | None = None) -> None:
        """Compute and store what is not in the cache yet.

        Raises:
          UserError: the cache is damaged, or there is no room for it.
        """
        corpus = self._described(reader)
        records = np.arange(len(corpus.keys))
        if trajectories is not None:
            records = np.unique(np.searchsorted(corpus.starts, np.asarray(trajectories), side="right") - 1)
        cache = self._cached.cache
        keys = [corpus.keys[record] for record in records]
        self._cached.verify(keys)
        missing = set(cache.missing(keys))
        sizes = {record: self._size(corpus, record) for record in records.tolist()} if missing else {}
        todo = {record: size for record, size in sizes.items() if corpus.keys[record] in missing}
        total, done, line = sum(todo.values()), 0, ProgressLine("frozen")
        if total:
            cache.require_room(total)
            self._log(
                f"frozen      computing {self._cached.layers} layers of {total:,} distinct tokens of {len(todo):,} "
                f"records at C={reader.granularity} once, into {cache.directory}"
            )
        # The last bits of a record depend on the rows it shares with others. So groups are of all records, and what
        # is missing is computed in the rows of a filling from the start: a kill changes nothing.
        for group in _groups(sizes):
            computed = sum(todo.get(record, 0) for record in group)
            if computed:
                self._compute(reader, corpus, group)
                done += computed
                self._show(line, done, total)
        self._cached.store()
        line.clear()
        if total:
            self._log(f"frozen      {total:,} tokens in {duration(line.elapsed)}, {total / line.elapsed:,.0f} tokens/s")
        else:
            self._log(f"frozen      {len(keys):,} records at C={reader.granularity} are in {cache.directory}")
        corpus.known[records] = True

    def __call__(
        self, members: Sequence[tuple[GranularityReader, int]], encoded: Sequence[Encoded], packed: PackedBatch
    ) -> Float[np.ndarray, "rows length width"]:
        """The hidden states of the rows of a batch, 0 in the padding."""
        ends = np.asarray(packed.subtree_end)
        places = np.full(ends.shape, -1, np.int64)
        for (reader, trajectory), solution, steps in zip(members, encoded, packed.step_positions, strict=False):
            if not len(solution.step_positions):
                continue
            row, columns = path_columns(ends, steps[len(solution.step_positions) - 1])
            corpus = self._described(reader)
            record = int(np.searchsorted(corpus.starts, trajectory, side="right")) - 1
            if not corpus.known[record]:
                raise ValueError(f"trajectory {trajectory} is of a record that was not prepared")
            moved = self._cached.cache.begin(corpus.keys[record]) - corpus.places.begin(int(corpus.starts[record]))
            places[row, columns] = corpus.places.path(trajectory) + moved
        return trunk.gathered(self._cached.cache, places)

    def free(self) -> None:
        """Let go of the trunk's weights: all is prepared."""
        self._cached.free()

    def _described(self, reader: GranularityReader) -> _Prepared:
        """The places of a corpus and the keys of its records, made when they are first needed."""
        if id(reader) not in self._corpora:
            starts = np.asarray(reader.record_starts)
            places = PrefixPlaces(reader.order, reader.shared, reader.lengths)
            keys = [
                places.digest(lambda i: reader[i].tokens, int(first), int(end))
                for first, end in itertools.pairwise(starts)
            ]
            self._corpora[id(reader)] = reader, _Prepared(places, starts, keys, np.zeros(len(keys), bool))
        return self._corpora[id(reader)][1]

    def _size(self, corpus: _Prepared, record: int) -> int:
        first, end = int(corpus.starts[record]), int(corpus.starts[record + 1])
        return corpus.places.begin(end) - corpus.places.begin(first)

    def _compute(self, reader: GranularityReader, corpus: _Prepared, records: Sequence[int]) -> None:
        encoded: list[Encoded] = []
        units: list[Unit] = []
        for record in records:
            own = [reader[i] for i in range(int(corpus.starts[record]), int(corpus.starts[record + 1]))]
            members = range(len(encoded), len(encoded) + len(own))
            encoded += own
            units.append(Unit(corpus.keys[record], list(members), PrefixPlaces.of([one.tokens for one in own])))
        self._cached.fill(self._planner.plan(encoded, range(len(encoded))), units)

    def _show(self, line: ProgressLine, done: int, total: int) -> None:
        line.show(lambda: f"{done:,} of {total:,} tokens, {done / line.elapsed:,.0f} tokens/s", done / total)


def _groups(sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Records (number -> tokens) in their order, in groups of about the same number of tokens."""
    group: list[int] = []
    tokens = 0
    for record, size in sizes.items():
        group.append(record)
        tokens += size
        if tokens >= _TOGETHER:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def open_hidden(
    config: TrainConfig,
    sources: Sources,
    partition: Partition,
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    mesh: Mesh,
    log: LogLine,
) -> CorpusHidden | None:
    """Where the loader takes hidden states from; None without a cache.

    Raises:
      UserError: the cache is that of something else, or damaged.
    """
    if not partition.cached:
        return None
    cache = trunk.open_cache(config.frozen.cache_frozen, partition, sources.model, tokenizer)
    if jax.process_count() > 1:  # each process looks for itself, and the first computes
        local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
        mesh = rules.make_mesh(DeviceConfig(), local)
    computing = TrunkComputation(
        partition,
        lambda: trunk.load_trunk(partition, sources.model, mesh),
        mesh,
        deterministic=config.model.deterministic,
    )
    net = partition.network.backbone
    most = _CPU_ROWS if mesh.devices.flat[0].platform == "cpu" else _ROWS
    planner = RowPlanner(
        config.encoding.max_length, net.hidden_size, "tree", most, row_length=0, multiple=rules.row_multiple(mesh)
    )
    return CorpusHidden(CachedTrunk(computing, cache), planner, log)
