"""Candidates from a policy: many rows decode at once, and a row that has finished takes the next candidate.

A prompt is computed once for all its candidates; each row then starts from a copy of its keys and values. What a prompt
shares with the one before it is not computed again, so prompts in depth-first order, a longer one before its own
prefixes, are computed as the tree that they are: by blocks, a branch from the border of one. Rows decode
for a few tokens on the device, by themselves; then the host takes out what has finished and gives the row the next
candidate, of the same question or a later one. Shapes are those of the row count and of a few cache lengths, so the
decode step compiles once a length, whatever comes.

The random numbers of a candidate come from the seed, its question's name, its number and the position, and no row sees
another. So a candidate is the same in whatever company and order it is sampled.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32

from cfprm_jax.errors import UserError
from cfprm_jax.inference import decoder, prompt_cache
from cfprm_jax.inference.choice import NOT_FINITE, ChoiceOptions, choose_or_mark
from cfprm_jax.inference.decoder import STRIDE, DecoderParams, KeysValues, Place
from cfprm_jax.inference.policy import Policy
from cfprm_jax.inference.prompt_cache import PromptCache
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.runtime import digests
from cfprm_jax.sharding import rules

# Rows a device are a multiple of this: with three, XLA's CPU kernels let the last bit depend on the cache's length.
_FEWEST = 8
# Host state of a row, as one array to send at once.
_TOKEN, _PROMPT, _POSITION, _MADE, _LIMIT, _QUESTION, _CANDIDATE = range(7)


class Prompt(NamedTuple):
    """A question's prompt; the name is what its random numbers depend on."""

    name: str
    tokens: Int32[np.ndarray, " length"]


class Generated(NamedTuple):
    """One candidate: its tokens, the one that ended it among them, and why it ended: "stop" or "length"."""

    tokens: Int32[np.ndarray, " length"]
    finish: str


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn (see :func:`cfprm_jax.inference.choice.choose`), and how many at most."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0


@dataclasses.dataclass
class SamplingCounts:
    """What was done so far; prefilled are tokens of prompts that were computed, and padding those beside them."""

    candidates: int = 0
    tokens: int = 0
    live: int = 0
    steps: int = 0
    prefilled: int = 0
    padding: int = 0


class _Static(NamedTuple):
    """What the decode step is compiled for, beside shapes."""

    config: PRMConfig
    stops: tuple[int, ...]
    choice: ChoiceOptions
    mesh: Mesh | None


class Sampler:
    """Samples from one policy.

    Attributes:
      rows: candidates that decode at once.
      counts: what was done so far, kept up to date while :meth:`sample` runs.
    """

    def __init__(self, policy: Policy, sampling: Sampling, rows: int, mesh: Mesh | None = None) -> None:
        """A sampler whose rows are split over the data and fsdp axes of the mesh (None is one device).

        Args:
          rows: candidates that decode at once, rounded up to a multiple of 8 for every device that splits them.
        """
        multiple = _FEWEST * (1 if mesh is None else rules.row_multiple(mesh))
        self.rows = -(-rows // multiple) * multiple
        self.counts = SamplingCounts()
        self._policy, self._sampling, self._mesh = policy, sampling, mesh
        self._static = _Static(
            policy.config,
            policy.stops,
            ChoiceOptions.of(sampling.temperature, sampling.top_k, sampling.top_p),
            mesh,
        )
        self._key = jax.random.key_data(jax.random.key(sampling.seed))
        self._numbers = np.array([sampling.temperature, sampling.top_p], np.float32)

    def sample(
        self, prompts: Sequence[Prompt], candidates: int, report: Callable[[], None] = lambda: None
    ) -> Iterator[list[Generated]]:
        """The candidates of every prompt, prompt by prompt in their order.

        The device continues while the caller uses the yielded candidates.

        Args:
          report: called after every few tokens.
        """
        run = _Run(
            prompts,
            candidates,
            self.rows,
            sampling=self._sampling,
            stops=frozenset(self._policy.stops),
            counts=self.counts,
        )
        cache = _Cache(self._policy, self.rows, self._mesh, self.counts)
        while run.refill(cache):
            cache.fit(int(run.state[_POSITION].max()) + 2 * STRIDE)
            cache.content, tokens = _decode(
                self._static, self._policy.params, cache.content, run.state, self._key, numbers=self._numbers
            )
            yield from run.ready()
            run.absorb(np.asarray(tokens))
            report()
        yield from run.ready()


class _Cache:
    """Keys and values of all rows on the device, and those of the prompts that rows still start from."""

    def __init__(self, policy: Policy, rows: int, mesh: Mesh | None, counts: SamplingCounts) -> None:
        self._policy, self._mesh, self._rows, self._counts = policy, mesh, rows, counts
        self.content: KeysValues = prompt_cache.empty(policy.config, mesh, rows)
        self._prompt = PromptCache(policy, mesh)

    def start(self, prompt: Int32[np.ndarray, " length"], rows: Sequence[int]) -> None:
        """Put a prompt's keys and values into rows; its last token is left for the first decode step."""
        computed, padding = self._prompt.prefill(prompt[:-1])
        self._counts.prefilled += computed
        self._counts.padding += padding
        self.fit(len(prompt), shrink=False)
        # Few sizes, each compiled once; numbers beyond the last row are dropped.
        count = 4
        while count < len(rows):
            count *= 4
        places = np.full(count, self._rows, np.int32)
        places[: len(rows)] = rows
        self.content = prompt_cache.insert(self._mesh, self.content, self._prompt.sequence, places)

    def fit(self, length: int, shrink: bool = True) -> None:
        """Resizes the cache for at least length columns."""
        blocks = prompt_cache.cache_blocks(length)
        if blocks > self.content.blocks or (shrink and blocks < self.content.blocks):
            self.content = prompt_cache.resize(self._mesh, self.content, blocks)


class _Run:
    """The host's side: which candidate each row has, and what is finished.

    Attributes:
      state: int32 [7, rows], the state of each row for a decode step.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        candidates: int,
        rows: int,
        *,
        sampling: Sampling,
        stops: frozenset[int],
        counts: SamplingCounts,
    ) -> None:
        self._prompts, self._candidates, self._limit = prompts, candidates, sampling.max_new_tokens
        self._stops, self._counts = np.array(sorted(stops)), counts
        self._queue = iter((q, c) for q in range(len(prompts)) for c in range(candidates))
        self._finished: dict[int, dict[int, Generated]] = collections.defaultdict(dict)
        self._next = 0
        # (question, candidate) of each row, and the tokens that it has so far.
        self._owner: list[tuple[int, int] | None] = [None] * rows
        self._tokens = np.zeros((rows, sampling.max_new_tokens + STRIDE), np.int32)
        self.state = np.zeros((7, rows), np.int32)

    def refill(self, cache: _Cache) -> bool:
        """Give every free row the next candidate; whether there is any row with one."""
        begun: dict[int, list[int]] = collections.defaultdict(list)
        for row in (row for row, owner in enumerate(self._owner) if owner is None):
            following = next(self._queue, None)
            if following is None:
                break
            self._owner[row] = following
            begun[following[0]].append(row)
            prompt = self._prompts[following[0]]
            self.state[:, row] = (
                prompt.tokens[-1],
                len(prompt.tokens) - 1,
                len(prompt.tokens) - 1,
                0,
                self._limit,
                _name_hash(prompt.name),
                following[1],
            )
        for question, rows in begun.items():
            cache.start(self._prompts[question].tokens, rows)
        self._counts.live = sum(owner is not None for owner in self._owner)
        return self._counts.live > 0

    def absorb(self, tokens: Int32[np.ndarray, "rows chunk"]) -> None:
        """Take up what a decode step gave, -1 being no token, and free the rows that have finished.

        Raises:
          UserError: the model gives logits that are not finite.
        """
        bad = np.flatnonzero((tokens == NOT_FINITE).any(axis=1))
        if len(bad):
            question, candidate = self._owner[bad[0]] or (0, 0)
            name = self._prompts[question].name.strip().replace("\n", " ")
            raise UserError(f"the model gives logits that are not finite, for candidate {candidate} of question {name}")
        owned = np.array([owner is not None for owner in self._owner])
        made = self.state[_MADE].copy()
        new = (tokens >= 0).sum(axis=1)
        places = made[:, None] + np.arange(tokens.shape[1])
        self._tokens[np.arange(len(tokens))[:, None], places] = tokens
        self.state[_MADE] += new
        self.state[_POSITION, owned] += tokens.shape[1]
        last = self._tokens[np.arange(len(tokens)), np.maximum(self.state[_MADE] - 1, 0)]
        self.state[_TOKEN] = last
        stopped = np.isin(last, self._stops)
        over = owned & (stopped | (self.state[_MADE] >= self._limit))
        self._counts.tokens += int(new.sum())
        self._counts.steps += 1
        for row in np.flatnonzero(over):
            question, candidate = self._owner[row] or (0, 0)
            self._finished[question][candidate] = Generated(
                self._tokens[row, : self.state[_MADE, row]].copy(), "stop" if stopped[row] else "length"
            )
            self._owner[row] = None
            self.state[:, row] = 0
        self._counts.candidates += int(over.sum())

    def ready(self) -> Iterator[list[Generated]]:
        """The questions whose candidates are all there, as far as those before them are out."""
        while len(self._finished.get(self._next, ())) == self._candidates:
            done = self._finished.pop(self._next)
            self._next += 1
            yield [done[number] for number in range(self._candidates)]


def _name_hash(name: str) -> int:
    return int.from_bytes(digests.raw(name)[:4], "little", signed=True)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _decode(
    static: _Static,
    params: DecoderParams,
    cache: KeysValues,
    state: Int[Array, "7 rows"],
    seed: Any,
    *,
    numbers: Float[Array, " settings"],
) -> tuple[KeysValues, Int[Array, "rows chunk"]]:
    """STRIDE tokens a row, -1 after its end; less if all rows end before."""
    net, dtype = static.config.backbone, jnp.dtype(static.config.dtype)
    rows = state.shape[1]
    place, made = Place(state[_PROMPT], state[_POSITION]), state[_MADE]
    stops = jnp.array(static.stops, jnp.int32)

    def name_key(question: jax.Array, candidate: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(seed), question), candidate)

    keys = jax.vmap(name_key)(state[_QUESTION].astype(jnp.uint32), state[_CANDIDATE])

    def more(carry: tuple[Any, ...]) -> jax.Array:
        return (carry[0] < STRIDE) & carry[2].any()

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        offset, tokens, live, tail, out = carry
        logits, tail = decoder.step(static.config, params, tokens, place, offset, cache=cache, tail=tail)
        at = jax.vmap(jax.random.fold_in)(keys, made + offset)
        chosen = choose_or_mark(logits, at, static.choice, numbers)
        out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(live, chosen, -1)[:, None], offset, axis=1)
        live &= ~(chosen[:, None] == stops).any(axis=1) & (made + offset + 1 < state[_LIMIT])
        return offset + 1, chosen, live, tail, out

    tail = prompt_cache.placed(static.mesh, decoder.empty(net, 1, rows, STRIDE, dtype))
    # A row without a candidate has the limit 0.
    start = (jnp.int32(0), state[_TOKEN], made < state[_LIMIT], tail, jnp.full((rows, STRIDE), -1, jnp.int32))
    *_, tail, out = jax.lax.while_loop(more, body, start)
    return prompt_cache.placed(static.mesh, decoder.extend(cache, tail, place)), out
