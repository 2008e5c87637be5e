"""Keys and values of prompts on the device, computed by blocks, for rows to start from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int32

from cfprm_jax.inference import decoder
from cfprm_jax.inference.decoder import BLOCK, DecoderParams, KeysValues
from cfprm_jax.inference.policy import Policy
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.sharding import rules


class PromptCache:
    """Keys and values of the last prompt; those of the blocks that the next one shares with it are kept.

    Attributes:
      sequence: a cache of one row, which begins with the tokens of the last call of :meth:`prefill`.
    """

    def __init__(self, policy: Policy, mesh: Mesh | None) -> None:
        self._policy, self._mesh = policy, mesh
        self._tokens = np.zeros(0, np.int32)
        self.sequence: KeysValues = empty(policy.config, mesh, 1)

    def prefill(self, tokens: Int32[np.ndarray, " length"]) -> tuple[int, int]:
        """Computes the keys and values of these tokens, except those of shared blocks.

        Returns:
          The number of these tokens that were computed, and of padding tokens that fill the last block.
        """
        both = min(len(tokens), len(self._tokens))
        differing = np.flatnonzero(tokens[:both] != self._tokens[:both])
        shared = int(differing[0]) if len(differing) else both
        if shared == len(tokens):
            return 0, 0
        self._tokens = tokens
        needed = cache_blocks(len(tokens))
        if needed > self.sequence.blocks:
            self.sequence = resize(self._mesh, self.sequence, needed)
        padded = np.zeros(-(-len(tokens) // BLOCK) * BLOCK, np.int32)
        padded[: len(tokens)] = tokens
        for block in range(shared // BLOCK, len(padded) // BLOCK):
            own = padded[block * BLOCK : (block + 1) * BLOCK]
            self.sequence = _prefill(
                self._policy.config, self._mesh, self._policy.params, self.sequence, own, block=np.int32(block)
            )
        return len(tokens) - shared // BLOCK * BLOCK, len(padded) - len(tokens)


def cache_blocks(columns: int) -> int:
    """The size in blocks of the smallest cache for a number of columns: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... blocks."""
    blocks = -(-columns // BLOCK)
    power = 1
    while power < blocks:
        power *= 2
    return power * 3 // 4 if power >= 4 and blocks <= power * 3 // 4 else power


def empty(config: PRMConfig, mesh: Mesh | None, rows: int) -> KeysValues:
    """A cache of one block."""
    net, dtype = config.backbone, jnp.dtype(config.dtype)
    where = None if mesh is None else _cache_sharding(mesh, net.num_key_value_heads, rows)
    return jax.jit(lambda: decoder.empty(net, 1, rows, BLOCK, dtype), out_shardings=where)()


def _cache_sharding(mesh: Mesh, kv_heads: int, rows: int) -> NamedSharding:
    heads = "tensor" if kv_heads % mesh.shape["tensor"] == 0 else None
    return NamedSharding(mesh, PartitionSpec(None, None if rows == 1 else rules.ROW_AXES, heads))


def placed(mesh: Mesh | None, cache: KeysValues) -> KeysValues:
    """Where a cache belongs, so that every step finds it where it left it."""
    if mesh is None:
        return cache
    _, rows, kv_heads, *_ = cache.values[0].shape
    where = _cache_sharding(mesh, kv_heads, rows)
    return jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, where), cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _prefill(
    config: PRMConfig,
    mesh: Mesh | None,
    params: DecoderParams,
    sequence: KeysValues,
    tokens: Int[Array, " block"],
    *,
    block: Int[Array, ""],
) -> KeysValues:
    return placed(mesh, decoder.prefill_block(config, params, sequence, tokens, block))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def insert(mesh: Mesh | None, cache: KeysValues, prompt: KeysValues, rows: Int[Array, " count"]) -> KeysValues:
    return placed(mesh, decoder.insert(cache, prompt, rows))


@functools.partial(jax.jit, static_argnums=(0, 2))
def resize(mesh: Mesh | None, cache: KeysValues, blocks: int) -> KeysValues:
    return placed(mesh, decoder.resize(cache, blocks))
