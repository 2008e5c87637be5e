"""Bootstraps over questions, and rank correlation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cfprm_jax.evaluation.statistics import bootstrap_interval, paired_p_value, spearman


def test_it_is_the_interval_of_the_binomial():
    # For a share p of n questions the bootstrap's mean is binomial: its standard deviation is known.
    outcomes = np.array([[1.0]] * 300 + [[0.0]] * 100)
    ((low, high),) = bootstrap_interval(outcomes, 20000, 0)
    half = 1.959964 * np.sqrt(0.75 * 0.25 / 400)
    assert abs(low - (0.75 - half)) < 0.004 and abs(high - (0.75 + half)) < 0.004


def test_systems_share_resamples_and_the_seed_decides():
    rng = np.random.default_rng(1)
    outcomes = rng.random((50, 2))
    both = np.column_stack([outcomes, outcomes])
    first = bootstrap_interval(both, 3000, 7)
    np.testing.assert_array_equal(first[:2], first[2:])
    np.testing.assert_array_equal(first, bootstrap_interval(both, 3000, 7))
    assert not np.array_equal(first, bootstrap_interval(both, 3000, 8))


def test_certainty_has_no_width():
    np.testing.assert_allclose(bootstrap_interval(np.tile([1.0, 0.0], (9, 1)), 1500, 0), [[1, 1], [0, 0]])


def test_it_agrees_with_resampling_written_out():
    outcomes = np.random.default_rng(0).random((30, 1))
    rng = np.random.default_rng(5)
    means = [outcomes[rng.integers(30, size=30), 0].mean() for _ in range(20000)]
    np.testing.assert_allclose(
        bootstrap_interval(outcomes, 20000, 3)[0], np.quantile(means, [0.025, 0.975]), atol=0.004
    )


def test_a_paired_p_value_is_that_of_the_sign_of_the_mean():
    rng = np.random.default_rng(0)
    # Means that are normal: the p-value is that of a z-test to the bootstrap's precision.
    values = rng.normal(size=(400, 3)) + np.array([0.0, 0.1, -0.15])
    z = values.mean(axis=0) / (values.std(axis=0) / 20)
    expected = [math.erfc(abs(value) / math.sqrt(2)) for value in z]
    np.testing.assert_allclose(paired_p_value(values, 20000, 1), expected, atol=0.02)


def test_equal_systems_and_sure_differences():
    differences = np.column_stack([np.zeros(50), np.ones(50), -np.ones(50)])
    np.testing.assert_allclose(paired_p_value(differences, 999, 0), [1.0, 0.002, 0.002])


def test_spearman_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 6, 80).astype(float), rng.random(80)
    assert spearman(one, one + 0.5 * other) == pytest.approx(stats.spearmanr(one, one + 0.5 * other).statistic)
    assert spearman(one, -one) == pytest.approx(-1.0)
    assert spearman(one, np.ones(80)) is None and spearman(one[:1], one[:1]) is None
