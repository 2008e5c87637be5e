"""F1 of right and wrong steps, and thresholds, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.evaluation.step_f1 import UNDEFINED, best_threshold, count, cross_fitted, f1


def test_f1_by_hand():
    found = f1(np.array([6.0, 2.0, 3.0, 1.0]))
    assert found.precision == 6 / 8 and found.recall == 6 / 7
    assert found.f1 == pytest.approx(12 / 15) and found.negative_f1 == pytest.approx(6 / 9)
    assert found.mean == pytest.approx((12 / 15 + 6 / 9) / 2) and found.defined


def test_ratios_of_nothing():
    # Everything is called right: no wrong step is found, and none is claimed.
    found = f1(np.array([5.0, 2.0, 0.0, 0.0]))
    assert found.negative_precision == UNDEFINED and found.negative_recall == 0 and found.negative_f1 == 0
    assert found.defined
    # Only right steps are called wrong: precision and recall are 0, their F1 is 0 / 0.
    found = f1(np.array([5.0, 2.0, 0.0, 1.0]))
    assert found.negative_f1 == UNDEFINED and not found.defined and found.floored.negative_f1 == 0
    assert not f1(np.zeros(4)).defined


def test_counts_by_case():
    valid, wrong = np.array([1, 1, 0, 0, 1], bool), np.array([0, 1, 1, 0, 0], bool)
    assert count(valid, wrong, np.array([0, 0, 0, 2, 2]), 3).tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]]


steps = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.7, 1.0]), st.booleans()), min_size=2, max_size=10)


@given(steps)
def test_no_threshold_is_better_than_the_best(pairs):
    signal, wrong = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])

    def score(threshold):
        found = f1(count(signal > threshold, wrong, np.zeros(len(wrong), int), 1)[0])
        return float(found.mean) if found.defined else UNDEFINED

    threshold, best = best_threshold(signal, wrong, 0.5)
    if wrong.all() or not wrong.any():
        assert (threshold, best) == (0.5, UNDEFINED)
    else:
        assert best == score(threshold) == pytest.approx(max(map(score, (-1, 0.1, 0.3, 0.6, 0.9, 1.5))))


def test_thresholds_come_from_the_other_half():
    signal = np.array([0.9, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    wrong = np.array([0, 0, 1, 1, 0, 0, 1, 1], bool)
    half = np.array([0, 0, 0, 0, 1, 1, 1, 1], bool)
    # The first half is divided at 0.7, the second at 0.25; each is judged by the other's.
    assert cross_fitted([signal], wrong, half, 0.5).tolist() == [True, True, True, True] + [False] * 4
    # A signal of the other direction is taken where it is better there.
    assert (cross_fitted([signal, -signal], ~wrong, half, 0.0) == cross_fitted([-signal], ~wrong, half, 0.0)).all()
