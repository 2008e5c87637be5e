"""A language model that takes one step at a time in several rows, whose caches are branched and pruned with them.

A step ends with the first token that completes the separator, which stays in the sequence. Rows decode STRIDE tokens
at a time (:mod:`cfprm_jax.inference.decoder`); what a row decodes beyond the end of its step is discarded, and the
next chunk begins at the row's last multiple of STRIDE, with the tokens that are known put in. So a row never prefills
what it or its parent has computed, but for less than STRIDE tokens a step.

The random numbers of a token come from the seed, the question's name, the row, the number of calls of `advance` so far,
and the token's position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from cfprm_jax.data.steps import split_steps
from cfprm_jax.errors import UserError
from cfprm_jax.inference import decoder
from cfprm_jax.inference.choice import NOT_FINITE, ChoiceOptions, choose_or_mark
from cfprm_jax.inference.decoder import BLOCK, STRIDE, DecoderParams, KeysValues, Place
from cfprm_jax.inference.policy import Policy
from cfprm_jax.inference.prompt_cache import PromptCache
from cfprm_jax.inference.sampler import Prompt, Sampling
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.runtime import digests
from cfprm_jax.searching.methods import Partial
from cfprm_jax.sharding import rules

# Rows are a multiple of this, as in the sampler.
_FEWEST = 8


class _Row(NamedTuple):
    """The host's side of one row.

    Attributes:
      partial: what the search sees.
      tokens: sampled so far.
      step: how many of them are in steps that have ended.
    """

    partial: Partial = Partial()
    tokens: tuple[int, ...] = ()
    step: int = 0


class StepSampler:
    """See the module; implements :class:`~cfprm_jax.searching.methods.StepPolicy`.

    Attributes:
      sampled, computed: numbers of tokens, as in the protocol.
    """

    def __init__(self, policy: Policy, sampling: Sampling, rows: int, separator: str, mesh: Mesh | None = None) -> None:
        """A policy for up to `rows` rows.

        Args:
          separator: between steps, such as a blank line.
          mesh: where the policy's parameters are.
        """
        self._policy, self._sampling, self._separator = policy, sampling, separator
        self._capacity = -(-rows // _FEWEST) * _FEWEST
        self._everywhere = None if mesh is None else rules.replicated(mesh)
        self._seed = jax.random.key_data(jax.random.key(sampling.seed))
        self._rows: list[_Row] = []
        self._cache: KeysValues | None = None
        self._prompts = PromptCache(policy, mesh)
        self._prompt, self._name = np.zeros(0, np.int32), 0
        self.sampled = self.computed = self._segments = self._advances = 0
        # Tokens of each row whose keys and values are in the cache: the prompt's all but one, and whole chunks.
        self._position = np.zeros(self._capacity, np.int32)

    @property
    def rows(self) -> list[Partial]:
        """The solution of each row."""
        return [row.partial for row in self._rows]

    def begin(self, question: Prompt) -> None:
        """One row with a prompt."""
        self._prompt, self._name = question.tokens, int.from_bytes(digests.raw(question.name)[:4], "little")
        kept = len(question.tokens) - 1
        self._prompts.prefill(question.tokens[:kept])
        blocks = _blocks(len(question.tokens) + 2 * STRIDE)
        make = _copier(self._policy.config, blocks, self._capacity, self._everywhere)
        self._cache = make(self._prompts.sequence)
        self._rows, self._advances = [_Row()], 0
        self._position[:] = kept
        self.computed += kept

    def branch(self, parents: Sequence[int]) -> None:
        """Row i becomes a copy of row parents[i], in one gather of the caches."""
        if len(parents) > self._capacity:
            raise ValueError(f"{len(parents)} rows for a policy of {self._capacity}")
        self._rows = [self._rows[i] for i in parents]
        index = np.zeros(self._capacity, np.int32)
        index[: len(parents)] = parents
        if not np.array_equal(index[: len(parents)], np.arange(len(parents))):
            self._cache = _gather(self._cache, index)
        self._position = self._position[index]

    def mark(self) -> Any:
        """The state for :meth:`restore`: what the caches have beyond it is not seen again."""
        return list(self._rows), self._position.copy()

    def restore(self, mark: Any) -> None:
        """The rows as they were."""
        self._rows, self._position = list(mark[0]), mark[1].copy()

    def advance(self, to_end: bool = False, greedy: bool = False) -> None:
        """Each unfinished row takes a step, or all until it finishes.

        Raises:
          UserError: the model gives logits that are not finite.
        """
        self._advances += 1
        begun = [len(row.tokens) for row in self._rows]
        going = [row.partial.finish is None for row in self._rows]
        while any(going):
            for i, new in self._chunk(going, greedy).items():
                row = self._rows[i]
                for token in new:
                    row = self._with_token(row, token)
                    if row.partial.finish is not None or (not to_end and len(row.tokens) == row.step):
                        going[i] = False
                        break
                self._rows[i] = row
                # The chunk is in the cache if all of it is of the sequence, and a token is left to continue with.
                if len(self._prompt) + len(row.tokens) > self._position[i] + STRIDE:
                    self._position[i] += STRIDE
        for i, before in enumerate(begun):
            row = self._rows[i]
            count = len(row.tokens) - before
            if count:
                segments = (*row.partial.segments, (self._segments, count))
                self._segments += 1
                self.sampled += count
                self._rows[i] = row._replace(partial=dataclasses.replace(row.partial, segments=segments))

    def _with_token(self, row: _Row, token: int) -> _Row:
        """The row with one more token: a step ends with the separator, the solution at a stop or at the limit."""
        tokens = (*row.tokens, token)
        stopped = token in self._policy.stops
        over = stopped or len(tokens) >= self._sampling.max_new_tokens
        own = list(tokens[row.step : -1] if stopped else tokens[row.step :])
        text = str(self._policy.tokenizer.decode(own, skip_special_tokens=True))
        # White space before a step is no step.
        if not over and self._separator not in text.lstrip():
            return row._replace(tokens=tokens)
        pieces = split_steps(text, self._separator)
        steps = row.partial.steps + ((self._separator.join(pieces),) if pieces else ())
        finish = None if not over else "stop" if stopped else "length"
        return _Row(dataclasses.replace(row.partial, steps=steps, finish=finish), tokens, len(tokens))

    def _chunk(self, going: Sequence[bool], greedy: bool) -> dict[int, list[int]]:
        """The next tokens of every row that is going, at most STRIDE of each."""
        first = len(self._prompt) - 1
        known = np.zeros((self._capacity, STRIDE), np.int32)
        count = np.ones(self._capacity, np.int32)
        for i, row in enumerate(self._rows):
            if going[i]:
                have = [int(self._prompt[-1]), *row.tokens][self._position[i] - first :]
                known[i, : len(have)], count[i] = have, len(have)
                self.computed += STRIDE
        assert self._cache is not None
        blocks = _blocks(int(self._position.max()) + 2 * STRIDE)
        if blocks > self._cache.blocks:
            self._cache = _resize(self._cache, blocks)
        sampling = self._sampling
        self._cache, chosen = _decode_chunk(
            self._policy.config,
            ChoiceOptions.of(0.0 if greedy else sampling.temperature, sampling.top_k, sampling.top_p),
            self._policy.params,
            self._cache,
            Place(np.full(self._capacity, first, np.int32), self._position.copy()),  # type: ignore[arg-type]
            known=known,
            count=count,
            seed=self._seed,
            names=np.array([self._name, self._advances], np.uint32),
            numbers=np.array([sampling.temperature or 1.0, sampling.top_p], np.float32),
        )
        found = np.asarray(chosen)
        new = {i: found[i, count[i] - 1 :].tolist() for i, live in enumerate(going) if live}
        if any(NOT_FINITE in tokens for tokens in new.values()):
            raise UserError("the policy gives logits that are not finite")
        return new


def _blocks(columns: int) -> int:
    """The smallest power of two of cache blocks that holds the columns."""
    blocks = 1
    while blocks * BLOCK < columns:
        blocks *= 2
    return blocks


@functools.cache
def _copier(config: PRMConfig, blocks: int, rows: int, where: jax.sharding.Sharding | None) -> Any:
    """A function of a prompt's keys and values: a cache that has them in every row. Compiled once for all questions."""

    def copied(prompt: KeysValues) -> KeysValues:
        cache = decoder.empty(config.backbone, blocks, rows, BLOCK, jnp.dtype(config.dtype))
        return decoder.insert(cache, prompt, jnp.arange(rows))

    return jax.jit(copied, out_shardings=where)


@jax.jit
def _gather(cache: KeysValues, parents: Int[Array, " rows"]) -> KeysValues:
    return jax.tree.map(lambda array: array[:, parents], cache)


@functools.partial(jax.jit, static_argnums=1)
def _resize(cache: KeysValues, blocks: int) -> KeysValues:
    return decoder.resize(cache, blocks)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode_chunk(
    config: PRMConfig,
    choice: ChoiceOptions,
    params: DecoderParams,
    cache: KeysValues,
    place: Place,
    *,
    known: Int[Array, "rows chunk"],
    count: Int[Array, " rows"],
    seed: Any,
    names: Any,
    numbers: Float[Array, " settings"],
) -> tuple[KeysValues, Int[Array, "rows chunk"]]:
    """The cache with the chunk's inputs, and the token chosen after each; after a known one it is discarded."""
    rows = known.shape[0]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), names[0]), names[1])
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
    tail = decoder.empty(config.backbone, 1, rows, STRIDE, jnp.dtype(config.dtype))

    def body(offset: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        chosen, tail, out = carry
        tokens = jnp.where(offset < count, jax.lax.dynamic_index_in_dim(known, offset, 1, keepdims=False), chosen)
        logits, tail = decoder.step(config, params, tokens, place, offset, cache=cache, tail=tail)
        at = jax.vmap(jax.random.fold_in)(keys, place.position + offset)
        chosen = choose_or_mark(logits, at, choice, numbers)
        return chosen, tail, jax.lax.dynamic_update_slice_in_dim(out, chosen[:, None], offset, axis=1)

    start = (known[:, 0], tail, jnp.zeros((rows, STRIDE), jnp.int32))
    _, tail, out = jax.lax.fori_loop(0, STRIDE, body, start)
    return decoder.extend(cache, tail, place), out
