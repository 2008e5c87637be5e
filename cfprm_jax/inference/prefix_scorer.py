"""Step scores where prefixes repeat over time, as in search and serving: only tokens that are new are computed.

Keys, values and scores of scored tokens stay in a pool on the device, by their prefix, the least recently used leaving
first. What is scored with a cached prefix equals what is scored without, to rounding: the same layers, under the same
tree rule, read the prefix's keys and values from the pool instead of computing them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from cfprm_jax.inference.encodings import make_encoder
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.prefix_rows import Lengths, PrefixRow, Tokens, divide
from cfprm_jax.inference.prefix_tree import PrefixTree
from cfprm_jax.models.attention import attention
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.layers import DecoderLayer, RMSNorm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.placement import Placement, unconstrained
from cfprm_jax.models.products import matmul_precision
from cfprm_jax.models.reward_head import RewardHead
from cfprm_jax.models.rotary import rotary_angles
from cfprm_jax.sharding import rules

Item = tuple[str, Sequence[str]]
"""A question and the steps of one solution."""

# As in cfprm_jax.inference.scorer: row length, in widths of the network, at which attention costs as much as all else.
_ATTENTION_WIDTHS = 8
# Queries against cached keys that are computed at once: their logits are a dense array.
_QUERY_BLOCK = 128
# Rows of a batch are one of these numbers, so that few shapes are compiled.
_ROW_COUNTS = (16, 4, 1)


class CachePool(NamedTuple):
    """Keys, rotated, and values of cached tokens, [layers, slots, kv_heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


class Inputs(NamedTuple):
    """Rows to compute, padded.

    Attributes:
      tokens, positions: of new columns; 0 in the padding.
      columns, ends: place in the row's tree of new columns, and where their subtrees end.
      slots, cached_columns, cached_ends: the same of cached columns, and their slots; in the padding the end is 0.
    """

    tokens: Int[Array, "rows new"]
    positions: Int[Array, "rows new"]
    columns: Int[Array, "rows new"]
    ends: Int[Array, "rows new"]
    slots: Int[Array, "rows cached"]
    cached_columns: Int[Array, "rows cached"]
    cached_ends: Int[Array, "rows cached"]


@dataclasses.dataclass
class PrefixTokenCounts:
    """Tokens so far: of all that was scored, those that were computed, and those whose keys and values were cached.

    What several sequences of one call share is computed once and counts once among `computed`.
    """

    requested: int = 0
    computed: int = 0
    reused: int = 0


class PrefixScorer:
    """Scores solutions with one PRM and keeps what it computed. Not for several threads at once.

    Attributes:
      encoder: how questions and steps become tokens.
      counts: tokens so far.
      shapes: (rows, new columns, cached columns) of the batches so far, each of which is compiled once.
      redundancy: whether the PRM has a redundancy output.
    """

    def __init__(
        self, loaded: LoadedPRM, cache_tokens: int, batch_tokens: int = 8192, mesh: Mesh | None = None
    ) -> None:
        """A scorer with an empty cache.

        Args:
          cache_tokens: most tokens whose keys and values are kept; 0 keeps none.
          batch_tokens: most new columns, with padding, of a batch of several rows.
          mesh: rows are split over its data and fsdp axes, keys and values over tensor; None is one device.
        """
        self._loaded, self._batch_tokens, self._mesh = loaded, batch_tokens, mesh
        self.encoder = make_encoder(loaded.encoding_name, loaded.tokenizer, loaded.encoding)
        self.counts, self.shapes = PrefixTokenCounts(), set[tuple[int, int, int]]()
        self.redundancy = loaded.config.redundancy
        self._lengths = Lengths.covering(loaded.encoding.max_length)
        self._attention = float(_ATTENTION_WIDTHS * loaded.config.backbone.hidden_size)
        self._multiple = 1 if mesh is None else rules.row_multiple(mesh)
        self._tree = PrefixTree(cache_tokens)
        self._scores = np.zeros((cache_tokens, 2 if self.redundancy else 1), np.float32)

        self._placement = unconstrained if mesh is None else rules.constrain_activations(mesh)
        self._pool = self._empty()

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are kept now."""
        return self._tree.held

    def clear(self) -> None:
        """Forget what is kept, as after an error in the middle of a batch."""
        self._tree.clear()
        self._pool = self._empty()

    @property
    def cache_bytes(self) -> int:
        """Size of the keys and values that may be kept."""
        return sum(array.nbytes for array in self._pool)

    def compile(self, every: bool) -> int:
        """Compile batch shapes ahead, by computing padding: every one that requests may have, or the smallest alone.

        Returns:
          how many there are now.
        """
        cached = self._lengths.cached if self._tree.capacity else (0,)
        shapes = itertools.product(_ROW_COUNTS[::-1], self._lengths.new, cached)
        for rows, *shape in itertools.islice(shapes, None if every else 1):
            if rows == 1 or rows * shape[0] <= self._batch_tokens:
                self._start([], [], shape=(rows, *shape))
        jax.block_until_ready(self._pool)
        return len(self.shapes)

    def score(self, items: Sequence[Item]) -> list[Float32[np.ndarray, " steps"] | None]:
        """The step logits of every solution; None for one without steps or over max_length, which is not scored."""
        encoded = self.encoder.encode_many([(question, steps, None) for question, steps in items])
        whole = [i for i, (_, steps) in enumerate(items) if len(steps) and len(encoded[i].step_positions) == len(steps)]
        outputs = self.outputs([Tokens(encoded[i].tokens, encoded[i].step_positions) for i in whole])
        found: list[Float32[np.ndarray, " steps"] | None] = [None] * len(items)
        for i, output in zip(whole, outputs, strict=True):
            found[i] = output[:, 0]
        return found

    def outputs(self, sequences: Sequence[Tokens]) -> list[Float32[np.ndarray, "steps outputs"]]:
        """The head's outputs at the positions of every sequence, none of which is over max_length.

        Returns:
          float32 [steps, 1] step logits, or [steps, 2] with the logits of redundancy.
        """
        self._tree.tick()
        matched = [self._tree.match(sequence.tokens) for sequence in sequences]
        # What follows the last position has no part in a score.
        ends = [int(sequence.positions.max(initial=-1)) + 1 for sequence in sequences]
        todo = [i for i, end in enumerate(ends) if len(matched[i]) < end]
        self.counts.requested += sum(len(sequence.tokens) for sequence in sequences)
        self.counts.reused += sum(map(len, matched))
        waiting = [sequences[i] for i in todo]
        rows = divide(waiting, [matched[i] for i in todo], self._lengths, self._attention)
        computing = [self._start(waiting, batch) for batch in self._batches(rows)]
        found = [
            self._scores[held[sequence.positions]] if len(held) >= end else np.zeros(0, np.float32)
            for sequence, held, end in zip(sequences, matched, ends, strict=True)
        ]
        for batch, kept, z in computing:
            for row, slots, values in zip(batch, kept, np.asarray(z, np.float32), strict=False):
                of_column = np.empty((len(row.tokens), self._scores.shape[1]), np.float32)
                own = values.reshape(len(values), -1)[: len(slots)]
                of_column[row.new], of_column[~row.new] = own, self._scores[row.slots[~row.new]]
                self._scores[slots[slots >= 0]] = own[slots >= 0]
                for member, path in zip(row.members, row.paths, strict=True):
                    found[todo[member]] = of_column[path[waiting[member].positions]]
        return found

    def _batches(self, rows: Sequence[PrefixRow]) -> Iterator[list[PrefixRow]]:
        """Rows of one shape together, as many as a batch may have."""
        shapes: dict[tuple[int, int], list[PrefixRow]] = {}
        for row in rows:
            new = int(row.new.sum())
            shapes.setdefault(self._lengths.holding(new, len(row.tokens) - new), []).append(row)
        for (length, _), those in sorted(shapes.items(), key=lambda shape: shape[0]):
            done = 0
            while done < len(those):
                most = min(len(those) - done, max(1, self._batch_tokens // length))
                count = next(number for number in _ROW_COUNTS if number <= most)
                yield those[done : done + count]
                done += count

    def _start(
        self, sequences: Sequence[Tokens], batch: list[PrefixRow], shape: tuple[int, ...] = ()
    ) -> tuple[list[PrefixRow], list[np.ndarray], jax.Array]:
        """Have a batch computed and kept; its rows, the slot of each new column or -1, and its outputs to be."""
        sizes = [(int(row.new.sum()), int((~row.new).sum())) for row in batch]
        rows, *lengths = shape or (
            len(batch),
            *self._lengths.holding(max(new for new, _ in sizes), max(cached for _, cached in sizes)),
        )
        rows = -(-rows // self._multiple) * self._multiple
        self.shapes.add((rows, lengths[0], lengths[1]))
        self.counts.computed += sum(new for new, _ in sizes)
        inputs = self._placed(_padded(batch, rows, *lengths))
        z, new = _forward(self._loaded.config, self._placement, self._loaded.params, self._pool, inputs)
        kept = [self._keep(sequences, row) for row in batch]
        if self._tree.capacity:
            where = np.full((rows, lengths[0]), self._tree.capacity, np.int32)
            for place, slots in zip(where, kept, strict=False):
                place[: len(slots)] = np.where(slots < 0, self._tree.capacity, slots)
            self._pool = _store(self._pool, new, where)
        return batch, kept, z

    def _keep(self, sequences: Sequence[Tokens], row: PrefixRow) -> np.ndarray:
        """Slots for the new columns of a row, under which its sequences are found from now on; -1 for none."""
        new = row.new
        slots = np.full(int(new.sum()), -1, np.int32)
        given = self._tree.allocate(len(slots))
        slots[: len(given)] = given  # columns come after their prefixes, so what gets none has no descendant with one
        of_column = row.slots.copy()
        of_column[new] = slots
        used = np.zeros(self._tree.capacity + 1, bool)
        for member, path in zip(row.members, row.paths, strict=True):
            own = of_column[path]
            length = len(own) if (own >= 0).all() else int(np.argmin(own >= 0))
            start = self._tree.insert(sequences[member].tokens[:length], own[:length])
            used[own[start:length]] = True
        # Another row of this call may have kept the same tokens.
        unused = given[~used[given]]
        self._tree.release(unused)
        slots[np.isin(slots, unused)] = -1
        return slots

    def _placed(self, inputs: Inputs) -> Inputs:
        if self._mesh is None:
            return inputs
        sharding = NamedSharding(self._mesh, PartitionSpec(rules.ROW_AXES))
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), inputs)

    def _pool_sharding(self) -> NamedSharding | None:
        if self._mesh is None:
            return None
        divides = self._loaded.config.backbone.num_key_value_heads % self._mesh.shape["tensor"] == 0
        return NamedSharding(self._mesh, PartitionSpec(None, None, "tensor" if divides else None))

    def _empty(self) -> CachePool:
        net = self._loaded.config.backbone
        # One slot at least: what has none to gather gathers slot 0, and does not see it.
        shape = (net.num_hidden_layers, max(1, self._tree.capacity), net.num_key_value_heads, net.head_dim)
        make = jax.jit(
            lambda: CachePool(*(jnp.zeros(shape, self._loaded.config.dtype) for _ in range(2))),
            out_shardings=self._pool_sharding(),
        )
        pool: CachePool = make()
        return pool


def _padded(batch: Sequence[PrefixRow], rows: int, new: int, cached: int) -> Inputs:
    """The rows of a batch as arrays of one shape."""
    shape = (rows, new)
    tokens, positions, columns, ends = (np.zeros(shape, np.int32) for _ in range(4))
    slots, cached_columns, cached_ends = (np.zeros((rows, cached), np.int32) for _ in range(3))
    for r in range(rows):
        size = total = 0
        if r < len(batch):
            row, total = batch[r], len(batch[r].tokens)
            mask = row.new
            (own,), (held,) = np.nonzero(mask), np.nonzero(~mask)
            size = len(own)
            tokens[r, :size], positions[r, :size] = row.tokens[own], row.positions[own]
            columns[r, :size], ends[r, :size] = own, row.subtree_end[own]
            slots[r, : len(held)] = row.slots[held]
            cached_columns[r, : len(held)], cached_ends[r, : len(held)] = held, row.subtree_end[held]
        # Padding sees itself alone.
        columns[r, size:] = np.arange(total, total + new - size)
        ends[r, size:] = columns[r, size:] + 1
    return Inputs(tokens, positions, columns, ends, slots, cached_columns, cached_ends)  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    config: PRMConfig, placement: Placement, params: Params, pool: CachePool, inputs: Inputs
) -> tuple[Float[Array, "rows new *outputs"], CachePool]:
    """The head's outputs at new columns, and their keys and values [layers, rows, new, kv_heads, head_dim]."""
    backbone = params["backbone"]
    stream = ("rows", "length", "embed")
    cosine, sine = rotary_angles(inputs.positions, config.backbone)
    x = placement(placement.embed(backbone["embedding"], inputs.tokens, config.dtype), stream)
    seen = _visible(inputs)
    graphdef, stacked = nnx.split(DecoderLayer(config, backbone["layers"]))

    def one_layer(x: jax.Array, layer: tuple[Any, jax.Array]) -> tuple[jax.Array, CachePool]:
        own: list[CachePool] = []

        def mix(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            own.append(CachePool(k, v))
            if not inputs.slots.shape[1]:  # then columns are places in the row, and any kernel computes it
                return attention(q, k, v, inputs.ends, config.attention, placement=placement)
            cached = (array[layer[1], inputs.slots] for array in pool)
            keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(cached, (k, v), strict=True))
            return _attend(q, keys, values, seen)

        x = placement(nnx.merge(graphdef, layer[0])(x, cosine, sine, mix), stream)
        return x, own[0]

    x, new = jax.lax.scan(one_layer, x, (stacked, jnp.arange(config.backbone.num_hidden_layers)))
    x = RMSNorm(backbone["final_norm"], config.backbone.rms_norm_eps)(x)
    return RewardHead(config, params["head"])(x), new


def _visible(inputs: Inputs) -> Bool[Array, "rows new columns"]:
    """Which of the cached columns, then of the new ones, each new column sees."""
    columns = jnp.concatenate([inputs.cached_columns, inputs.columns], axis=1)[:, None]
    ends = jnp.concatenate([inputs.cached_ends, inputs.ends], axis=1)[:, None]
    own = inputs.columns[:, :, None]
    return (columns <= own) & (own < ends)


def _attend(
    q: Float[Array, "rows new heads head_dim"],
    keys: Float[Array, "rows columns kv_heads head_dim"],
    values: Float[Array, "rows columns kv_heads head_dim"],
    seen: Bool[Array, "rows new columns"],
) -> Float[Array, "rows new heads head_dim"]:
    """Grouped-query attention under a mask, the softmax in float32, a block of queries at a time."""
    rows, new, heads, head_dim = q.shape
    precision = matmul_precision(q.dtype)
    q = (q * head_dim**-0.5).astype(q.dtype).reshape(rows, new, keys.shape[2], -1, head_dim)

    def block(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, mask = part
        logits = jnp.einsum("rqkgd,rtkd->rkgqt", queries, keys, precision=precision, preferred_element_type=jnp.float32)
        logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
        return jnp.einsum("rkgqt,rtkd->rqkgd", weights, values, precision=precision)

    if new <= _QUERY_BLOCK:
        return block((q, seen)).reshape(rows, new, heads, head_dim)
    parts = tuple(
        jnp.moveaxis(array.reshape(rows, new // _QUERY_BLOCK, _QUERY_BLOCK, *array.shape[2:]), 1, 0)
        for array in (q, seen)
    )
    return jnp.moveaxis(jax.lax.map(block, parts), 0, 1).reshape(rows, new, heads, head_dim)


@functools.partial(jax.jit, donate_argnums=0)
def _store(pool: CachePool, new: CachePool, where: Int[Array, "rows new"]) -> CachePool:
    """The pool with the keys and values of new columns in their slots; beyond the last slot is nowhere."""
    places = where.reshape(-1)
    return CachePool(
        *(
            old.at[:, places].set(array.reshape(len(array), -1, *array.shape[3:]), mode="drop", unique_indices=False)
            for old, array in zip(pool, new, strict=True)
        )
    )
