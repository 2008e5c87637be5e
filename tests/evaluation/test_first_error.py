"""Where the first error is: predictions, accuracies, and the threshold that suits best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.evaluation.first_error import NO_ERROR, LabelledSolution, accuracies, harmonic_mean, predict, tune


def labelled(scores, label):
    return LabelledSolution(None if scores is None else np.array(scores), label)


@pytest.mark.parametrize(
    ("scores", "threshold", "prediction"),
    [
        ([0.9, 0.4, 0.3], 0.5, 1),
        ([0.9, 0.5], 0.5, NO_ERROR),
        ([0.9, 0.8], 0.85, 1),
        ([0.1], 0.0, NO_ERROR),
        (None, 0.5, None),
    ],
)
def test_the_first_step_below_the_threshold(scores, threshold, prediction):
    assert predict(None if scores is None else np.array(scores), threshold) == prediction


def test_accuracies_by_hand():
    solutions = [
        labelled([0.9, 0.1, 0.2], 1),  # found
        labelled([0.4, 0.1], 1),  # too early
        labelled([0.9, 0.9], 0),  # not found
        labelled([0.9, 0.9], NO_ERROR),  # rightly none
        labelled([0.9, 0.3], NO_ERROR),  # wrongly one
        labelled(None, NO_ERROR),  # not scored: a miss
    ]
    found = accuracies(solutions, 0.5)
    assert (found.erroneous, found.correct, found.unscored) == (3, 3, 1)
    assert found.accuracy_erroneous == found.accuracy_correct == found.f1 == pytest.approx(1 / 3)


def test_f1_at_its_limits():
    assert harmonic_mean(0.0, 0.0) == 0.0 and harmonic_mean(1.0, 0.0) == 0.0
    assert harmonic_mean(0.5, None) is None and harmonic_mean(0.6, 0.3) == pytest.approx(0.4)
    assert accuracies([labelled([0.1], 0)], 0.5).f1 is None


grid = st.sampled_from([0.0, 0.2, 0.25, 0.5, 0.75, 0.9, 1.0])


@given(
    st.lists(
        st.tuples(st.lists(grid, min_size=1, max_size=4), st.integers(-1, 3)).map(
            lambda p: (p[0], min(p[1], len(p[0]) - 1))
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200)
def test_no_threshold_is_better_than_the_tuned_one(pairs):
    solutions = [labelled(scores, label) for scores, label in pairs]

    def f1(threshold):
        return accuracies(solutions, threshold).f1 or 0.0

    best = max(f1(threshold) for threshold in np.linspace(0, 1, 201))
    assert f1(tune(solutions)) == pytest.approx(best)


def test_of_equally_good_thresholds_the_one_nearest_to_a_half():
    solutions = [labelled([0.9, 0.2], 1), labelled([0.8, 0.8], NO_ERROR), labelled([0.1, 0.45, 0.62], 0)]
    assert tune(solutions) == pytest.approx((0.45 + 0.62) / 2)
