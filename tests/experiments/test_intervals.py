"""Intervals against hand computation and against repeated experiments."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.experiments.intervals import estimates


def test_by_hand():
    # Seed means 0.5 and 0.0, question means 0, 0, 0.5, 0.5: a = 0.125 / 2, b = 0.25 / 3 / 4.
    table = np.array([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    (found,) = estimates([table])
    a, b = 0.125 / 2, (4 * 0.25**2 / 3) / 4
    assert found.mean == 0.25 and found.deviation == pytest.approx(np.sqrt(0.125))
    assert found.error == pytest.approx(np.sqrt(a + b))
    freedom = (a + b) ** 2 / (a**2 / 1 + b**2 / 3)
    from scipy import stats

    half = stats.t.ppf(0.975, freedom) * found.error
    assert (found.low, found.high) == pytest.approx((0.25 - half, 0.25 + half))
    assert found.p == pytest.approx(2 * stats.t.sf(0.25 / found.error, freedom))
    assert (found.family_low, found.family_high) == (found.low, found.high)


def test_one_seed_is_about_questions_alone():
    rng = np.random.default_rng(0)
    values = rng.random((1, 50))
    (found,) = estimates([values])
    assert np.isnan(found.deviation) and found.error == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_a_family_has_wider_intervals():
    rng = np.random.default_rng(1)
    tables = [rng.normal(0.2, 1.0, (5, 40)) for _ in range(8)]
    alone = [estimates([table])[0] for table in tables]
    together = estimates(tables)
    for one, other in zip(alone, together, strict=True):
        assert (one.low, one.high) == (other.low, other.high)
        assert other.family_low < other.low and other.high < other.family_high


def test_nothing_differs():
    (found,) = estimates([np.zeros((3, 5))])
    assert (found.mean, found.low, found.high, found.p, found.sign) == (0, 0, 0, 1.0, 0)
    (sure,) = estimates([np.ones((3, 5))])
    assert sure.p == 0.0 and sure.sign == 1


@pytest.mark.parametrize(("of_seeds", "of_questions", "rest"), [(0.05, 0.0, 0.3), (0.0, 0.3, 0.3), (0.02, 0.2, 0.4)])
def test_intervals_cover(of_seeds, of_questions, rest):
    """Seeds, questions or both may be what differs: coverage should be 95 %, and 93 % would be too little."""
    rng = np.random.default_rng(2)
    covered, runs = 0, 600
    for _ in range(runs):
        table = rng.normal(0, of_seeds, (5, 1)) + rng.normal(0, of_questions, (1, 120)) + rng.normal(0, rest, (5, 120))
        (found,) = estimates([table])
        covered += found.low <= 0 <= found.high
    assert 0.93 <= covered / runs <= 0.999
