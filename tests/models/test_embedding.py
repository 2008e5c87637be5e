"""The embedding's gradient: both ways of summing it against a loop, and which of them a platform takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.models import embedding

VOCAB = 11


def example(seed: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of which some are beyond the table and one is most of them, and integers, whose sums are exact."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB + 3, length)
    tokens[rng.random(length) < 0.4] = 7
    return tokens.astype(np.int32), rng.integers(-50, 50, (length, 5)).astype(np.float32)


@pytest.mark.parametrize("add", [embedding.scatter_add, embedding.sorted_add])
@pytest.mark.parametrize(("seed", "length"), [(0, 1), (1, 2), (2, 63), (3, 64), (4, 200)])
def test_sums_of_each_id(add, seed: int, length: int) -> None:
    tokens, grad = example(seed, length)
    expected = np.zeros((VOCAB, 5), np.float32)
    for token, row in zip(tokens, grad, strict=True):
        if token < VOCAB:
            expected[token] += row
    np.testing.assert_array_equal(jax.jit(add, static_argnums=2)(tokens, grad, VOCAB), expected)


def test_sorting_adds_thousands_to_the_last_bits() -> None:
    """In a tree, so that a sum is off by the logarithm of its terms and not by their number."""
    grad = np.random.default_rng(0).standard_normal((4096, 3)).astype(np.float32) + 1
    # In one program: the scan alone is a hundred operations.
    add = jax.jit(embedding.sorted_add, static_argnums=2)
    (found,) = np.asarray(add(jnp.zeros(4096, jnp.int32), grad, 1))
    np.testing.assert_allclose(found, grad.sum(axis=0, dtype=np.float64), rtol=3e-7)


def test_only_gpus_sort() -> None:
    tokens, grad = jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4, 3), jnp.bfloat16)
    add = jax.jit(embedding.add_rows, static_argnums=2)
    here = add.lower(tokens, grad, VOCAB).as_text()
    there = add.trace(tokens, grad, VOCAB).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.sort" not in here
    assert "stablehlo.sort" in there
