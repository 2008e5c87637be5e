"""Attention against a float64 loop over visible pairs; the tree rule; isolation; every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.models.attention import BACKENDS, attention, visible


def reference(q, k, v, subtree_end):
    """The definition in float64, one token at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for r in range(rows):
        for i in range(length):
            seen = [j for j in range(i + 1) if i < subtree_end[r, j]]
            for h in range(heads):
                logits = k[r, seen, h // group] @ q[r, i, h] / np.sqrt(head_dim)
                weights = np.exp(logits - logits.max())
                out[r, i, h] = weights @ v[r, seen, h // group] / weights.sum()
    return out


def forest(generator, length):
    """A random forest in depth-first order, and padding that sees itself."""
    filled = int(generator.integers(length // 2, length + 1))
    parents, path = [], []
    for i in range(filled):
        while path and generator.random() < 0.3:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(i)
    end = np.arange(1, length + 1)
    for i in reversed(range(filled)):
        if parents[i] >= 0:
            end[parents[i]] = max(end[parents[i]], end[i])
    ancestors = [{i} for i in range(length)]
    for i in range(filled):
        if parents[i] >= 0:
            ancestors[i] |= ancestors[parents[i]]
    return end.astype(np.int32), ancestors


def inputs(seed, rows, length, heads, kv_heads, head_dim, dtype=jnp.float32):
    generator = np.random.default_rng(seed)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)


def test_visible_is_the_ancestor_relation():
    end, ancestors = forest(np.random.default_rng(3), 40)
    mask = np.asarray(visible(jnp.asarray(end)[None]))[0]
    for i in range(40):
        assert set(np.flatnonzero(mask[i])) == ancestors[i]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(7, 1, 20), (4, 4, 33), (6, 2, 150), (2, 1, 300)])
def test_equals_the_definition(backend, heads, kv_heads, length):
    q, k, v = inputs(length, 2, length, heads, kv_heads, 8)
    end = np.stack([forest(np.random.default_rng(seed), length)[0] for seed in (1, 2)])
    got = jax.jit(attention, static_argnums=4)(q, k, v, jnp.asarray(end), backend)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(q, k, v, end), rtol=1e-5, atol=2e-6)


def test_gradient_equals_that_of_the_whole_square():
    length, heads, kv_heads, head_dim = 200, 4, 2, 8
    q, k, v = inputs(0, 2, length, heads, kv_heads, head_dim)
    end = jnp.asarray(np.stack([forest(np.random.default_rng(seed), length)[0] for seed in (5, 6)]))

    def square(q, k, v):
        k, v = jnp.repeat(k, heads // kv_heads, 2), jnp.repeat(v, heads // kv_heads, 2)
        logits = jnp.einsum("rihd,rjhd->rhij", q, k) / np.sqrt(head_dim)
        return jnp.einsum("rhij,rjhd->rihd", jax.nn.softmax(logits, where=visible(end)[:, None]), v)

    def total(function):
        return lambda *args: jnp.sum(jnp.sin(function(*args)))

    expected = jax.jit(jax.grad(total(square), argnums=(0, 1, 2)))(q, k, v)
    got = jax.jit(jax.grad(total(lambda q, k, v: attention(q, k, v, end)), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_token_nobody_sees_changes_nothing_else_by_a_bit():
    q, k, v = inputs(1, 1, 160, 4, 2, 8)
    # Tokens 0..9 are a prefix; 10..79 and 80..159 are branches from it.
    end = np.concatenate([np.full(10, 160), np.full(70, 80), np.full(80, 160)]).astype(np.int32)[None]
    run = jax.jit(attention)
    before = run(q, k, v, end)
    change = lambda x: x.at[:, 10:80].add(3.0)  # noqa: E731
    after = run(change(q), change(k), change(v), end)
    np.testing.assert_array_equal(before[:, :10], after[:, :10])
    np.testing.assert_array_equal(before[:, 80:], after[:, 80:])
    assert np.abs(before - after)[:, 10:80].max() > 0.1


def test_bfloat16_keeps_its_type_and_is_close():
    q, k, v = inputs(2, 2, 64, 4, 2, 16, jnp.bfloat16)
    end = np.full((2, 64), 64, np.int32)
    got = jax.jit(attention)(q, k, v, end)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), reference(q, k, v, end), atol=0.03)


def test_large_logits_stay_finite():
    q, k, v = inputs(4, 1, 16, 2, 1, 8)
    end = np.full((1, 16), 16, np.int32)
    got = jax.jit(attention)(q * 1e4, k * 1e4, v, end)
    assert np.isfinite(got).all()


def test_unknown_backend_is_named():
    q, k, v = inputs(0, 1, 4, 1, 1, 2)
    with pytest.raises(UserError, match="attention: 'flash3' is not among: auto, xla"):
        attention(q, k, v, jnp.full((1, 4), 4), "flash3")
