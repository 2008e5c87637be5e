"""Draws against exact probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.inference.choice import choose


def exact(logits, temperature, top_k=0, top_p=None):
    """The distribution, in float64, by sorting as transformers does: temperature, top-k, top-p."""
    z = np.asarray(logits, np.float64) / temperature
    if top_k:
        z[z < np.sort(z)[-top_k]] = -np.inf
    p = np.exp(z - z.max())
    p /= p.sum()
    if top_p is not None:
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
    return p / p.sum()


def draws(logits, *options, number=2000):
    keys = jax.random.split(jax.random.key(0), number)
    many = jnp.tile(jnp.asarray(logits, jnp.float32)[:, None], (1, number))
    return np.asarray(jax.jit(lambda z, k: choose(z, k, *options))(many, keys))


@pytest.mark.parametrize(("vocab", "number"), [(7, 40_000), (600, 5000)])
@pytest.mark.parametrize(
    "options",
    [(1.0,), (0.5,), (2.0, 3), (1.0, 0, 0.8), (1.0, 0, 0.05), (0.7, 5, 0.9), (1.0, 10_000), (1.5, 0, 0.999999)],
)
def test_draws_have_the_exact_distribution(vocab, number, options):
    logits = 2 * np.random.default_rng(vocab).standard_normal(vocab)
    p = exact(logits, options[0], options[1] if len(options) > 1 and options[1] < vocab else 0, *options[2:])
    counts = np.bincount(draws(logits, *options, number=number), minlength=vocab)
    assert not counts[p == 0].any()
    # Pearson's statistic over the tokens that are expected often enough, the others as one.
    often = p * number >= 10
    expected = np.append(p[often], p[~often].sum()) * number
    found = np.append(counts[often], counts[~often].sum())
    kept = expected > 0
    statistic = ((found[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_top_p_keeps_at_least_the_most_probable():
    assert set(draws([1.0, 3.0, 2.0], 1.0, 0, 1e-6)) == {1}
    assert set(draws([1.0, 3.0, 2.0], 1.0, 2, 1e-6)) == {1}


def test_none_takes_the_most_probable_the_first_on_a_tie():
    logits = jnp.array([[0.0, 5.0], [2.0, 5.0], [2.0, -1.0]])
    np.testing.assert_array_equal(choose(logits, jax.random.split(jax.random.key(0), 2), None), [1, 0])


def test_what_has_no_weight_is_never_drawn():
    logits = np.full(3000, -np.inf, np.float32)
    logits[[5, 256, 2999]] = 0.0
    for options in ((1.0,), (1.0, 0, 0.9), (1.0, 4), (1.0, 4, 0.5)):
        assert set(draws(logits, *options)) <= {5, 256, 2999}
    assert set(draws(logits, 1.0)) == {5, 256, 2999}


def test_a_row_depends_on_its_own_key_and_logits_alone():
    logits = jax.random.normal(jax.random.key(1), (700, 6))
    keys = jax.random.split(jax.random.key(2), 6)
    for options in ((1.0,), (1.0, 0, 0.5), (1.0, 20, 0.5)):
        together = np.asarray(choose(logits, keys, *options))
        alone = [int(choose(logits[:, i : i + 1], keys[i : i + 1], *options)[0]) for i in range(6)]
        np.testing.assert_array_equal(together, alone)
