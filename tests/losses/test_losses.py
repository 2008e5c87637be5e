"""The three losses: golden values, an independent float64 version, properties, and gradients at the edges."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cfprm_jax import losses
from cfprm_jax.config import LossConfig

ALL = ("bce", "mse", "q_ranking")
SHAPE = (4, 9)


def reference(name: str, z: np.ndarray, y: np.ndarray, margin: float = 4.0) -> tuple[float, float]:
    """(total, count) in float64, written from the definitions trajectory by trajectory."""
    total, count = 0.0, 0
    for scores, labels in zip(z.astype(np.float64), y.astype(np.float64), strict=True):
        known = ~np.isnan(labels)
        if name == "bce":
            total += float(
                np.sum(
                    labels[known] * np.logaddexp(0, -scores[known])
                    + (1 - labels[known]) * np.logaddexp(0, scores[known])
                )
            )
            count += int(known.sum())
        elif name == "mse":
            with np.errstate(over="ignore"):
                total += float(np.sum((1 / (1 + np.exp(-scores[known])) - labels[known]) ** 2))
            count += int(known.sum())
        else:
            negatives = [s + margin for s, label in zip(scores, labels, strict=True) if label <= 0.5]
            terms, positives = [], []
            for s, label in zip(scores, labels, strict=True):
                if label > 0.5:
                    positives.append(s)
                    terms.append(np.logaddexp.reduce([0.0, *positives, *negatives]) - s)
            if negatives:
                terms.append(np.logaddexp.reduce([0.0, *negatives]))
            if terms:
                total += float(np.mean(terms))
                count += 1
    return total, count


@functools.cache
def jitted(name: str, margin: float = 4.0):
    """(value, gradient) of a loss, compiled once a shape for the whole file."""
    loss = losses.loss_function(LossConfig(loss=name, margin=margin))
    return jax.jit(loss), jax.jit(jax.grad(lambda z, y: loss(z, y)[0]))


def compute(name: str, z, y, margin: float = 4.0) -> tuple[float, float]:
    total, count = jitted(name, margin)[0](jnp.asarray(z), jnp.asarray(y, jnp.float32))
    assert total.dtype == count.dtype == jnp.float32
    assert total.shape == count.shape == ()
    return float(total), float(count)


def gradient(name: str, z, y) -> np.ndarray:
    return np.asarray(jitted(name)[1](jnp.asarray(z), jnp.asarray(y, jnp.float32)))


scores = hnp.arrays(np.float32, SHAPE, elements=st.floats(-20, 20, width=32))
labels = hnp.arrays(np.float32, SHAPE, elements=st.sampled_from([0.0, 1.0, 0.5, 0.25, 0.75, float("nan")]))
few = settings(max_examples=40)


@pytest.mark.parametrize("name", ALL)
def test_hand_values(name: str) -> None:
    """One positive, one negative step at z = 0: every value can be written down."""
    positive = {"bce": np.log(2), "mse": 0.25, "q_ranking": np.log(2)}[name]
    negative = {"bce": np.log(2), "mse": 0.25, "q_ranking": np.log1p(np.exp(4.0))}[name]
    assert compute(name, np.zeros((1, 1), np.float32), [[1.0]]) == (pytest.approx(positive, rel=1e-6), 1)
    assert compute(name, np.zeros((1, 1), np.float32), [[0.0]]) == (pytest.approx(negative, rel=1e-6), 1)


def test_golden(shared) -> None:
    """Every case of the shared golden file: sums, counts, and Q-ranking at each margin."""
    cases = json.loads((shared / "golden" / "losses.json").read_text())["cases"]
    assert len(cases) >= 13
    for case in cases:
        z = np.asarray([case["scores"]], np.float32)
        y = np.asarray([[np.nan if label is None else label for label in case["labels"]]], np.float32)
        for name in ("bce", "mse"):
            total, count = compute(name, z, y)
            assert total == pytest.approx(case[f"{name}_sum"], rel=2e-6, abs=1e-30), (case["name"], name)
            assert count == case["labelled_steps"]
        for margin, value in (case["q_ranking"] or {"4": 0.0}).items():  # null: no labelled step
            total, count = compute("q_ranking", z, y, float(margin))
            assert total == pytest.approx(value, rel=2e-6), (case["name"], margin)
            assert count == (case["labelled_steps"] > 0)


@pytest.mark.parametrize("name", ALL)
@few
@given(z=scores, y=labels)
def test_equals_float64(name: str, z: np.ndarray, y: np.ndarray) -> None:
    total, count = reference(name, z, y)
    assert compute(name, z, y) == (pytest.approx(total, rel=3e-6, abs=3e-6), count)


@pytest.mark.parametrize("name", ALL)
@few
@given(z=scores, y=labels, padding=st.sampled_from([1, 4]), seed=st.integers(0, 2**31))
def test_padding_and_batch_mates_change_nothing(name: str, z, y, padding: int, seed: int) -> None:
    """Steps and trajectories without a label, whatever their scores, leave sums and gradients as they are."""
    noise = np.random.default_rng(seed).normal(0, 50, (SHAPE[0] + 1, SHAPE[1] + padding)).astype(np.float32)
    wide_z, wide_y = noise, np.full(noise.shape, np.nan, np.float32)
    wide_z[: SHAPE[0], : SHAPE[1]], wide_y[: SHAPE[0], : SHAPE[1]] = z, y
    wide_z[-1, 0] = np.nan  # what stands in padding may be anything
    total, count = compute(name, z, y)
    assert compute(name, wide_z, wide_y) == (pytest.approx(total, rel=1e-6, abs=1e-6), count)
    parts = [compute(name, z[i : i + 1], y[i : i + 1]) for i in range(len(z))]
    assert total == pytest.approx(sum(p[0] for p in parts), rel=1e-6, abs=1e-5)
    assert count == sum(p[1] for p in parts)
    grads = gradient(name, wide_z, wide_y)
    np.testing.assert_allclose(grads[: SHAPE[0], : SHAPE[1]], gradient(name, z, y), rtol=1e-5, atol=1e-6)
    assert not grads[np.isnan(wide_y)].any()


@few
@given(z=scores, y=labels, seed=st.integers(0, 2**31))
def test_q_ranking_ignores_the_order_of_negatives(z, y, seed: int) -> None:
    """Moving negatives among the places of negatives changes nothing; positives count in their order."""
    rng = np.random.default_rng(seed)
    shuffled = z.copy()
    for i in range(len(z)):
        places = np.flatnonzero(y[i] <= 0.5)
        shuffled[i, places] = z[i, rng.permutation(places)]
    total, count = compute("q_ranking", z, y)
    assert compute("q_ranking", shuffled, y) == (pytest.approx(total, rel=2e-6, abs=2e-6), count)


def test_q_ranking_order_of_positives_matters() -> None:
    rising, _ = compute("q_ranking", np.asarray([[1, 2, 3]], np.float32), [[1, 1, 1]])
    falling, _ = compute("q_ranking", np.asarray([[3, 2, 1]], np.float32), [[1, 1, 1]])
    assert rising < falling


@pytest.mark.parametrize("name", ALL)
def test_gradient_is_the_slope(name: str) -> None:
    """Against central differences of the float64 version, soft and missing labels included."""
    rng = np.random.default_rng(3)
    z = rng.normal(0, 2, SHAPE)
    y = rng.choice([0, 1, 0.4, 0.8, np.nan], SHAPE)
    slope, h = np.zeros(SHAPE), 1e-5
    for index in np.ndindex(*SHAPE):
        step = np.zeros(SHAPE)
        step[index] = h
        slope[index] = (reference(name, z + step, y)[0] - reference(name, z - step, y)[0]) / (2 * h)
    np.testing.assert_allclose(gradient(name, z.astype(np.float32), y), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_finite_at_large_scores(name: str, size: float) -> None:
    """Value right to float32 and gradient finite for every combination of signs and labels, alone and mixed."""
    grid = np.asarray([[a, b, c] for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1)], np.float32) * size
    for y in ([1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0], [np.nan, 1, 0], [np.nan, np.nan, 1]):
        batch = np.tile(np.asarray(y, np.float32), (len(grid), 1))
        total, _ = compute(name, grid, batch)
        assert total == pytest.approx(reference(name, grid, batch)[0], rel=1e-5, abs=1e-5)
        assert np.isfinite(gradient(name, grid, batch)).all()


@pytest.mark.parametrize("name", ALL)
def test_without_labels(name: str) -> None:
    """Value 0, count 0, gradient exactly 0: also where the scores are huge or not finite."""
    z = np.asarray([[1e4, -1e4, 3.0], [np.nan, np.inf, 0.0]], np.float32)
    y = np.full(z.shape, np.nan)
    assert compute(name, z, y) == (0.0, 0.0)
    np.testing.assert_array_equal(gradient(name, z, y), np.zeros(z.shape))


@pytest.mark.parametrize("name", ALL)
def test_bfloat16_scores(name: str) -> None:
    """The arithmetic is float32 whatever the scores' type, and the gradient comes back in the scores' type."""
    z = jnp.asarray(np.random.default_rng(0).normal(0, 3, SHAPE), jnp.bfloat16)
    y = np.random.default_rng(1).choice([0.0, 1.0, np.nan], SHAPE)
    expected = reference(name, np.asarray(z, np.float32), y)
    assert compute(name, z, y) == (pytest.approx(expected[0], rel=3e-6), expected[1])
    assert jitted(name)[1](z, jnp.asarray(y, jnp.float32)).dtype == jnp.bfloat16


def test_margin_reaches_the_loss() -> None:
    z, y = np.zeros((1, 1), np.float32), [[0.0]]
    assert compute("q_ranking", z, y, margin=0.0)[0] == pytest.approx(np.log(2), rel=1e-6)
