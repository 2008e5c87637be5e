"""Which token comes next: a draw from logits under temperature, top-k and top-p, exact and without sorting.

A draw needs one uniform number and the place where the cumulative distribution passes it. That is found in two levels,
so that no cumulative sum runs over a whole vocabulary.

For top-p alone no threshold is computed either. A token belongs to the nucleus iff the tokens more probable than it
have less than top_p of the mass together. So a token is drawn from the whole distribution and looked at: if it is not
in the nucleus, neither is any that is at most as probable, and the next draw is from those more probable. What is
accepted in the end has the distribution of the nucleus, and one look is nearly always enough.

Order of the filters, as in transformers and vLLM: temperature, then top-k, then top-p of what is left. Of tokens that
are equally probable, all are in a nucleus or none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

# Tokens of the lower level: about the square root of Qwen2's vocabulary.
_BLOCK = 256

NOT_FINITE = -2
"""In place of a token, where logits are not finite."""

Number = float | Float[Array, ""]
"""A number, traced or not."""


class ChoiceOptions(NamedTuple):
    """What a draw is compiled for; temperature and top_p are numbers that it is called with.

    Attributes:
      greedy: the most probable token.
      top_k: as of :func:`choose`.
      nucleus: whether top_p is below 1.
    """

    greedy: bool
    top_k: int
    nucleus: bool

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float) -> ChoiceOptions:
        """The options of a temperature, 0 being greedy, top_k and top_p."""
        greedy = temperature == 0
        return cls(greedy, 0 if greedy else top_k, top_p < 1)


def choose_or_mark(
    logits: Float[Array, "vocab rows"],
    keys: Key[Array, " rows"],
    options: ChoiceOptions,
    numbers: Float[Array, " settings"],
) -> Int[Array, " rows"]:
    """A token a row as :func:`choose`, or NOT_FINITE where the logits of a row are not finite.

    Args:
      numbers: temperature and top_p.
    """
    temperature, top_p = None if options.greedy else numbers[0], numbers[1] if options.nucleus else None
    chosen = choose(logits, keys, temperature, options.top_k, top_p)
    return jnp.where(jnp.isfinite(logits.max(axis=0)), chosen, NOT_FINITE)


def choose(
    logits: Float[Array, "vocab rows"],
    keys: Key[Array, " rows"],
    temperature: Number | None,
    top_k: int = 0,
    top_p: Number | None = None,
) -> Int[Array, " rows"]:
    """A token a row.

    Args:
      logits: float32.
      keys: a key a row; its token depends on this row's logits and key alone.
      temperature: positive; None takes the most probable token, the first on a tie.
      top_k: number of most probable tokens to draw from; 0 is all.
      top_p: draw among the most probable tokens that together have this share of the mass; None
        among all.
    """
    vocab = logits.shape[0]
    if temperature is None:
        return jnp.argmax(logits, axis=0).astype(jnp.int32)
    if 0 < top_k < vocab:
        best, tokens = jax.lax.top_k(logits.T, top_k)
        place = _from_sorted(best.T / temperature, keys, top_p)
        return jnp.take_along_axis(tokens.T, place[None], axis=0)[0].astype(jnp.int32)
    scaled = logits / temperature
    weights = jnp.exp(scaled - scaled.max(axis=0))
    if top_p is None:
        return _draw(weights, jax.vmap(jax.random.uniform)(keys))
    return _nucleus(weights, keys, top_p)


def _from_sorted(
    logits: Float[Array, "k rows"], keys: Key[Array, " rows"], top_p: Number | None
) -> Int[Array, " rows"]:
    """A draw among logits in descending order."""
    weights = jnp.exp(logits - logits[0])
    if top_p is not None:
        before = jnp.cumsum(weights, axis=0) - weights
        weights = jnp.where(before < top_p * weights.sum(axis=0), weights, 0)
    return _draw(weights, jax.vmap(jax.random.uniform)(keys))


def _nucleus(weights: Float[Array, "vocab rows"], keys: Key[Array, " rows"], top_p: Number) -> Int[Array, " rows"]:
    """A draw from the nucleus; see the docstring of the module."""
    limit = top_p * weights.sum(axis=0)
    rows = weights.shape[1]

    def attempt(state: tuple[Any, ...]) -> tuple[Any, ...]:
        number, floor, chosen, done = state
        uniform = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, number)))(keys)
        token = _draw(jnp.where(weights > floor, weights, 0), uniform)
        weight = jnp.take_along_axis(weights, token[None], axis=0)[0]
        inside = jnp.where(weights > weight, weights, 0).sum(axis=0) < limit
        chosen = jnp.where(done, chosen, token)
        floor = jnp.where(done | inside, floor, weight)
        return number + 1, floor, chosen, done | inside

    # The most probable token is always in the nucleus, so this ends.
    start = (jnp.int32(0), jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))
    return jax.lax.while_loop(lambda state: ~state[3].all(), attempt, start)[2]


def _draw(weights: Float[Array, "vocab rows"], uniform: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """The token at which the cumulative weight passes uniform * total; never one of weight 0."""
    vocab, rows = weights.shape
    if vocab <= _BLOCK:
        return _passed(weights, uniform)[0]
    padded = jnp.pad(weights, ((0, -vocab % _BLOCK), (0, 0))).reshape(-1, _BLOCK, rows)
    block, fraction = _passed(padded.sum(axis=1), uniform)
    inside = jnp.take_along_axis(padded, block[None, None], axis=0)[0]
    return block * _BLOCK + _passed(inside, fraction)[0]


def _passed(
    weights: Float[Array, "n rows"], uniform: Float[Array, " rows"]
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Where the cumulative weight passes uniform * total, and how far into that weight, as a fraction below 1."""
    # A parallel sum may fall by a rounding where it should stand still; a token without weight is never taken.
    reached = jnp.where(weights > 0, jnp.cumsum(weights, axis=0), 0)
    # In float32 u * c < c for every u below 1 that the generator gives, so something passes.
    target = uniform * reached.max(axis=0)
    place = jnp.argmax(reached > target, axis=0).astype(jnp.int32)
    weight = jnp.take_along_axis(weights, place[None], axis=0)[0]
    into = target - (jnp.take_along_axis(reached, place[None], axis=0)[0] - weight)
    return place, jnp.clip(into / weight, 0.0, 1 - 2.0**-24)
