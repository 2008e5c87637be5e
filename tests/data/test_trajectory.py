"""Trajectory: what it refuses, and that labels keep their exact values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data import Trajectory
from cfprm_jax.errors import UserError


def test_labels_are_frozen_float32_and_keep_their_value() -> None:
    trajectory = Trajectory("q", ("a", "b", "c"), [0.7, None, True], "f:1")
    assert trajectory.labels.dtype == np.float32
    assert trajectory.labels[0] == np.float32(0.7)
    assert np.isnan(trajectory.labels[1])
    assert trajectory.labels[2] == 1
    with pytest.raises(ValueError, match="read-only"):
        trajectory.labels[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        trajectory.question = "other"


def test_the_callers_array_is_not_shared() -> None:
    labels = np.array([1.0, 0.0], np.float32)
    trajectory = Trajectory("q", ("a", "b"), labels, "f:1")
    labels[0] = 0.5
    assert trajectory.labels[0] == 1


@given(st.floats(0, 1, width=32))
def test_a_float32_label_is_kept_to_the_bit(label: float) -> None:
    assert Trajectory("q", ("a",), [label], "f:1").labels[0] == np.float32(label)


@pytest.mark.parametrize(
    ("steps", "labels", "message"),
    [
        ((), (), "row without steps"),
        (("a", "b", "c"), (1, 0), "row with 3 steps and 2 labels"),
        (("a",), (1, 0), "row with 1 step and 2 labels"),
        (("a",), (1.7,), r"label 1.7 is outside \[0, 1\]"),
        (("a", "b"), (0, -100), r"label -100 is outside \[0, 1\]"),
        (("a",), (float("inf"),), r"label inf is outside \[0, 1\]"),
        # Rounds to 1 in float32, but is not a label.
        (("a",), (1.00000001,), "is outside"),
    ],
)
def test_what_is_refused(steps: tuple[str, ...], labels: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trajectory("q", steps, labels, "f:1")


def test_equality_is_by_content_and_unlabelled_equals_unlabelled() -> None:
    one = Trajectory("q", ("a", "b"), [1, None], "f:1", "id", "4")
    assert one == Trajectory("q", ("a", "b"), [1, None], "f:1", "id", "4")
    assert hash(one) == hash(Trajectory("q", ("a", "b"), [1, None], "f:1", "id", "4"))
    for change in (
        {"labels": [0, None]},
        {"labels": [1, 0]},
        {"steps": ("a", "c")},
        {"source": "f:2"},
        {"answer": None},
    ):
        assert one != dataclasses.replace(one, **change)
    assert one != "q"
