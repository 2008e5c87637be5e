"""One token at a time through the backbone, for many rows at once, over keys and values that are kept.

The layer is that of :mod:`cfprm_jax.models.layers`; what differs is the attention. Activations are [features, rows]
here: on CPU a product with a kernel [out, in] is a fifth faster that way at 64 rows, and as fast elsewhere.

A row's keys and values stand in two places. The cache has the prompt's and, from the next multiple of STRIDE on, those
of what was decoded; the tail has the last few, which all rows write at the same place, so that a step changes nothing
but one column of a small array. :func:`extend` puts a full tail, STRIDE tokens, into the cache. Layers are separate
arrays: stacked ones would be copied out of the stack at every step.

What one row gets does not depend on the other rows, nor on how long the cache is, to the bit: the cache is in blocks
of one size, each is computed as if alone, and blocks that a row has nothing in add zeros in the order of the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.layers import FIRST, DecoderLayer, RMSNorm
from cfprm_jax.models.parameters import Params
from cfprm_jax.models.products import matmul_precision
from cfprm_jax.models.rotary import rotary_angles

BLOCK = 128
"""Columns of a block of the cache."""
STRIDE = 8
"""Columns of the tail."""


class KeysValues(NamedTuple):
    """Keys and values of some positions, one array a layer.

    Attributes:
      keys: [blocks, rows, kv_heads, head_dim, columns] each, rotated; the order in which products with queries are
        fastest.
      values: [blocks, rows, kv_heads, columns, head_dim] each.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def blocks(self) -> int:
        """Blocks that there are."""
        return self.values[0].shape[0]


class Place(NamedTuple):
    """Where rows are.

    Attributes:
      prompt: columns of the cache that hold the prompt.
      position: tokens whose keys and values are in the cache, the prompt's included; the tail begins there.
    """

    prompt: Int[Array, " rows"]
    position: Int[Array, " rows"]

    @property
    def column(self) -> Int[Array, " rows"]:
        """Column of the cache that the tail goes to: whole tails never cross the border of a block."""
        return self.position + -self.prompt % STRIDE


class DecoderParams(NamedTuple):
    """Parameters for decoding, each layer's apart, in the compute type. The head is [vocab, embed]."""

    embedding: jax.Array
    layers: tuple[Params, ...]
    final_norm: Params
    lm_head: jax.Array


def empty(net: BackboneConfig, blocks: int, rows: int, columns: int, dtype: Any) -> KeysValues:
    """Zeros: what is masked must still be finite."""
    kv, width = net.num_key_value_heads, net.head_dim
    layers = range(net.num_hidden_layers)
    return KeysValues(
        tuple(jnp.zeros((blocks, rows, kv, width, columns), dtype) for _ in layers),
        tuple(jnp.zeros((blocks, rows, kv, columns, width), dtype) for _ in layers),
    )


def prefill_block(
    config: PRMConfig,
    params: DecoderParams,
    sequence: KeysValues,
    tokens: Int[Array, " block"],
    block: Int[Array, ""],
) -> KeysValues:
    """Keys and values of one sequence, with one more block of its tokens.

    What a token gets depends on those before it alone, to the bit, so that a sequence can be continued from any block
    of another one with the same tokens before it.

    Args:
      sequence: a cache of one row, which holds the blocks before.
      tokens: BLOCK of them. What stands after a prompt's end changes nothing before it.
      block: place of the block.
    """
    net = config.backbone
    cosine, sine = rotary_angles((block * BLOCK + jnp.arange(BLOCK))[None], net)
    places = jnp.arange(sequence.blocks)[:, None, None]
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))
    seen = (places < block) | ((places == block) & causal)
    x = params.embedding[tokens][None].astype(config.dtype)
    keys, values = [], []

    def mix(held: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        corner = (block, 0, 0, 0, 0)
        held_k = jax.lax.dynamic_update_slice(held[0], k[:, None].transpose(1, 0, 3, 4, 2), corner)
        held_v = jax.lax.dynamic_update_slice(held[1], v[:, None].transpose(1, 0, 3, 2, 4), corner)
        keys.append(held_k)
        values.append(held_v)
        # Every query is a row of its own, which sees the keys of the one sequence.
        groups = q[0].reshape(BLOCK, net.num_key_value_heads, -1, net.head_dim)
        return _attend(groups, ((held_k, held_v, seen),)).reshape(q.shape)

    for layer, held in zip(params.layers, zip(*sequence, strict=True), strict=True):
        x = DecoderLayer(config, layer)(x, cosine, sine, functools.partial(mix, held))
    return KeysValues(tuple(keys), tuple(values))


def insert(cache: KeysValues, sequence: KeysValues, rows: Int[Array, " count"]) -> KeysValues:
    """The cache with one sequence at the front of some rows; row numbers beyond the last are none."""

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        # The cache may lack a block that holds nothing but the sequence's padding.
        blocks = min(old.shape[0], new.shape[0])
        front = (slice(blocks), rows, *(slice(size) for size in new.shape[2:]))
        return old.at[front].set(new[:blocks], mode="drop")

    return KeysValues(
        tuple(put(old, new) for old, new in zip(cache.keys, sequence.keys, strict=True)),
        tuple(put(old, new) for old, new in zip(cache.values, sequence.values, strict=True)),
    )


def resize(cache: KeysValues, blocks: int) -> KeysValues:
    """The cache with more blocks at its end, or fewer."""

    def sized(array: jax.Array) -> jax.Array:
        return jnp.pad(array[:blocks], ((0, max(0, blocks - array.shape[0])), *[(0, 0)] * 4))

    return jax.tree.map(sized, cache)


def extend(cache: KeysValues, tail: KeysValues, place: Place) -> KeysValues:
    """The cache with each row's tail where it belongs; there must be room."""
    block, column = jnp.divmod(place.column, BLOCK)
    where = jnp.stack([block, jnp.arange(len(block)), column], axis=1)

    def put(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        # One window a row. A vmapped update would have the whole cache transposed for it.
        dimensions = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, axis)
        )
        return jax.lax.scatter(
            old, where, new[0], dimensions, unique_indices=True, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        )

    return KeysValues(
        tuple(put(old, new, 4) for old, new in zip(cache.keys, tail.keys, strict=True)),
        tuple(put(old, new, 3) for old, new in zip(cache.values, tail.values, strict=True)),
    )


def step(
    config: PRMConfig,
    params: DecoderParams,
    tokens: Int[Array, " rows"],
    place: Place,
    offset: Int[Array, ""],
    *,
    cache: KeysValues,
    tail: KeysValues,
) -> tuple[Float[Array, "vocab rows"], KeysValues]:
    """The logits after one more token a row, and the tail with that token in column offset.

    Args:
      tokens: the token at position place.position + offset of each row.
      offset: tokens that all rows have in the tail.

    Returns:
      float32 logits [vocab, rows], and the tail.
    """
    net = config.backbone
    rows = tokens.shape[0]
    cosine, sine = rotary_angles((place.position + offset)[None], net)
    column = jnp.arange(cache.blocks * BLOCK).reshape(-1, 1, BLOCK)
    prompt, begin, end = (array[:, None] for array in (place.prompt, place.column - place.position, place.column))
    seen = (column < prompt) | ((column >= prompt + begin) & (column < end))
    recent = jnp.broadcast_to(jnp.arange(STRIDE) <= offset, (1, rows, STRIDE))
    x = params.embedding[tokens].astype(config.dtype).T
    keys, values = [], []

    def mix(
        cached: tuple[jax.Array, jax.Array],
        last: tuple[jax.Array, jax.Array],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> jax.Array:
        tail_k = jax.lax.dynamic_update_slice_in_dim(last[0], k[0][None, ..., None], offset, axis=4)
        tail_v = jax.lax.dynamic_update_slice_in_dim(last[1], v[:, :, :, None], offset, axis=3)
        keys.append(tail_k)
        values.append(tail_v)
        groups = q[0].reshape(rows, net.num_key_value_heads, -1, net.head_dim)
        return _attend(groups, ((*cached, seen), (tail_k, tail_v, recent))).reshape(q.shape)

    for layer, cached, last in zip(params.layers, zip(*cache, strict=True), zip(*tail, strict=True), strict=True):
        x = DecoderLayer(config, layer, FIRST)(x, cosine, sine, functools.partial(mix, cached, last))
    x = RMSNorm(params.final_norm, net.rms_norm_eps, FIRST)(x)
    logits = jnp.einsum(
        "er,ve->vr",
        x,
        params.lm_head.astype(x.dtype),
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits, KeysValues(tuple(keys), tuple(values))


def _attend(
    q: Float[Array, "rows kv_heads group head_dim"], parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]]
) -> Float[Array, "rows kv_heads group head_dim"]:
    """Attention of one query a head, the softmax in float32.

    Args:
      parts: keys, values, and [blocks, rows, columns] which of them a row sees; at least one over all parts. Keys
        and values of one row are seen by all rows.
    """
    precision = matmul_precision(q.dtype)
    q = (q * q.shape[-1] ** -0.5).astype(q.dtype)

    def product(form: str, one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.einsum(form, one, other, precision=precision, preferred_element_type=jnp.float32)

    def logits(keys: jax.Array, seen: jax.Array) -> jax.Array:
        each = jnp.broadcast_to(q, (len(keys), *q.shape))
        if keys.shape[1] == 1 < len(q):
            products = _rows_last(product("bkid,bkdt->bkit", _rows_first(each), keys[:, 0]), len(q))
        else:
            products = product("brkgd,brkdt->brkgt", each, keys)
        return jnp.where(seen[:, :, None, None], products, jnp.finfo(jnp.float32).min)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        if values.shape[1] == 1 < len(q):
            return _rows_last(product("bkit,bktd->bkid", _rows_first(weights), values[:, 0]), len(q))
        return product("brkgt,brktd->brkgd", weights, values)

    every = [logits(keys, seen) for keys, _, seen in parts]
    largest = functools.reduce(jnp.maximum, [_fold(jnp.maximum, z.max(axis=-1)) for z in every])
    weights = [jnp.exp(z - largest[..., None]) for z in every]
    total = functools.reduce(jnp.add, [_fold(jnp.add, w.sum(axis=-1)) for w in weights])
    mixed = [mix(w.astype(q.dtype), values) for w, (_, values, _) in zip(weights, parts, strict=True)]
    return (functools.reduce(jnp.add, [_fold(jnp.add, m) for m in mixed]) / total[..., None]).astype(q.dtype)


def _rows_first(array: jax.Array) -> jax.Array:
    """[blocks, rows, kv_heads, group, n] to [blocks, kv_heads, rows * group, n]."""
    blocks, _, kv_heads, _, size = array.shape
    return array.transpose(0, 2, 1, 3, 4).reshape(blocks, kv_heads, -1, size)


def _rows_last(array: jax.Array, rows: int) -> jax.Array:
    """Back from :func:`_rows_first`."""
    blocks, kv_heads, _, size = array.shape
    return array.reshape(blocks, kv_heads, rows, -1, size).transpose(0, 2, 1, 3, 4)


def _fold(function: Callable[[jax.Array, jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """Over axis 0, one by one; on CPU a reduction in its place, fused into the product, made that six times as slow."""
    return functools.reduce(function, [array[i] for i in range(len(array))])
