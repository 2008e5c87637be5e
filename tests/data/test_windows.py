"""Windows: a worked example, and the properties that any solution must keep."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data import Trajectory, merge
from cfprm_jax.data.windows import samples
from cfprm_jax.errors import UserError

nan = float("nan")
label_values = st.one_of(st.none(), st.floats(0, 1, width=32))
sizes = st.integers(1, 9)


@st.composite
def trajectories(draw: st.DrawFn, min_steps: int = 1) -> Trajectory:
    steps = draw(st.lists(st.text(max_size=4), min_size=min_steps, max_size=12))
    labels = draw(st.lists(label_values, min_size=len(steps), max_size=len(steps)))
    return Trajectory("q", tuple(steps), labels, "f:1", "id", "answer")


def example() -> Trajectory:
    return Trajectory("q", tuple(f"s{number}" for number in range(1, 8)), [1, 1, 1, 0, 1, 1, 0], "f:1")


def shown(trajectory: Trajectory) -> list[tuple[str, float]]:
    return list(zip(trajectory.steps, trajectory.labels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        (4, [("s1 s2 s3 s4", 0), ("s5 s6 s7", 0)]),
        (3, [("s1 s2 s3", 1), ("s4 s5 s6", 1), ("s7", 0)]),
        (2, [("s1 s2", 1), ("s3 s4", 0), ("s5 s6", 1), ("s7", 0)]),
        (1, [("s1", 1), ("s2", 1), ("s3", 1), ("s4", 0), ("s5", 1), ("s6", 1), ("s7", 0)]),
        (7, [("s1 s2 s3 s4 s5 s6 s7", 0)]),
        (99, [("s1 s2 s3 s4 s5 s6 s7", 0)]),
        ("whole", [("s1 s2 s3 s4 s5 s6 s7", 0)]),
    ],
)
def test_the_example_of_the_design(granularity: int | str, expected: list[tuple[str, float]]) -> None:
    assert shown(merge(example(), granularity, separator=" ")) == expected
    assert [shown(sample) for sample in samples(example(), granularity, separator=" ")] == [expected]


def test_the_default_separator_is_a_blank_line() -> None:
    assert merge(example(), 4).steps == ("s1\n\ns2\n\ns3\n\ns4", "s5\n\ns6\n\ns7")


def test_tail_drop() -> None:
    assert shown(merge(example(), 3, tail="drop", separator=" ")) == [("s1 s2 s3", 1), ("s4 s5 s6", 1)]
    assert shown(merge(example(), 7, tail="drop", separator=" ")) == [("s1 s2 s3 s4 s5 s6 s7", 0)]
    assert shown(merge(example(), "whole", tail="drop", separator=" ")) == [("s1 s2 s3 s4 s5 s6 s7", 0)]
    assert samples(example(), 8, tail="drop") == []
    with pytest.raises(UserError, match="f:1: a solution of 7 steps has no whole window of 8"):
        merge(example(), 8, tail="drop")


def test_stride_one_gives_the_shifted_segmentations() -> None:
    shifted = [shown(sample) for sample in samples(example(), 3, stride="1", separator=" ")]
    assert [[text for text, _ in sample] for sample in shifted] == [
        ["s1 s2 s3", "s4 s5 s6", "s7"],
        ["s1", "s2 s3 s4", "s5 s6 s7"],
        ["s1 s2", "s3 s4 s5", "s6 s7"],
    ]
    labels = [sample.labels for sample in samples(example(), 3, stride="1")]
    np.testing.assert_array_equal(labels[0], [1, 1, 0])
    np.testing.assert_array_equal(labels[1], [nan, 0, 0])
    np.testing.assert_array_equal(labels[2], [nan, 1, 0])


def test_stride_one_of_a_short_solution_leaves_out_what_has_no_window() -> None:
    short = Trajectory("q", ("a", "b"), [1, 0], "f:1")
    kept = samples(short, 4, stride="1", separator=" ")
    assert [sample.steps for sample in kept] == [("a b",), ("a", "b")]
    np.testing.assert_array_equal(kept[1].labels, [nan, 0])
    assert samples(short, 2, tail="drop", stride="1", separator=" ") == [merge(short, 2, separator=" ")]


@pytest.mark.parametrize("stride", ["window", "1"])
def test_one_step_has_no_coarse_sample(stride: str) -> None:
    one = Trajectory("q", ("a",), [1], "f:1")
    assert samples(one, 2, stride=stride) == []
    assert samples(one, 1, stride=stride) == [one]
    assert samples(one, "whole", stride=stride) == [dataclasses.replace(one, granularity="whole")]
    assert merge(one, 2) == dataclasses.replace(one, granularity=2)


def test_steps_that_are_windows_already_are_not_merged_again() -> None:
    merged = merge(Trajectory("q", tuple("abcd"), [1, 1, 0, 1], "f:1"), 2)
    assert merged.granularity == 2
    assert samples(merged, 1) == [merged]
    for size in (2, "whole"):
        with pytest.raises(UserError, match=r"f:1: its steps are merged already \(granularity 2"):
            samples(merged, size)


def test_given_windows() -> None:
    """Labels are those of the last steps; a row of one step stays; a row that names none is an error."""
    row = Trajectory("q", tuple("abcd"), [1, 1, 0, 1], "f:1", windows=(2, 1, 1))
    for stride, tail in (("window", "keep"), ("1", "drop")):
        (merged,) = samples(row, "given", stride=stride, tail=tail, separator="|")
        assert merged.steps == ("a|b", "c", "d") and merged.granularity == "given" and merged.windows is None
        np.testing.assert_array_equal(merged.labels, [1, 0, 1])
    assert samples(row, 1) == [row]
    assert [one.steps for one in samples(Trajectory("q", ("a",), [1], "f:1", windows=(1,)), "given")] == [("a",)]
    with pytest.raises(UserError, match=r'f:1: --granularities=given, and the row has no "windows"; .* its 4 steps'):
        samples(Trajectory("q", tuple("abcd"), [1, 1, 0, 1], "f:1"), "given")
    with pytest.raises(UserError, match=r"its steps are merged already \(granularity given"):
        samples(merged, 2)
    assert merge(merged, 2, separator="|").granularity == "given"


@pytest.mark.parametrize("windows", [(), (2, 1), (2, 3), (0, 4), (5, -1)])
def test_windows_add_up_to_the_steps(windows) -> None:
    with pytest.raises(
        UserError, match=r"row with 4 steps and windows of .*: expected positive sizes that add up to 4"
    ):
        Trajectory("q", tuple("abcd"), [1, 1, 0, 1], "f:1", windows=windows)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: merge(t, 0),
        lambda t: merge(t, "half"),
        lambda t: merge(t, 2, tail="cut"),
        lambda t: samples(t, 2, stride="2"),
    ],
)
def test_unknown_choices_are_refused(call) -> None:
    with pytest.raises(UserError, match="neither"):
        call(example())


@given(trajectories(), st.one_of(sizes, st.just("whole")))
def test_texts_concatenate_back_and_labels_are_those_of_the_last_steps(trajectory: Trajectory, size: int | str) -> None:
    merged = merge(trajectory, size, separator="|")
    assert "|".join(merged.steps) == "|".join(trajectory.steps)
    width = len(trajectory.steps) if size == "whole" else size
    last = [min(end, len(trajectory.steps)) - 1 for end in range(width, len(trajectory.steps) + width, width)]
    np.testing.assert_array_equal(merged.labels, trajectory.labels[last])
    assert (merged.question, merged.source, merged.id, merged.answer) == ("q", "f:1", "id", "answer")


@given(trajectories(), sizes)
def test_dropping_the_tail_removes_only_a_short_last_window(trajectory: Trajectory, size: int) -> None:
    whole, short = divmod(len(trajectory.steps), size)
    kept = merge(trajectory, size)
    for dropped in samples(trajectory, size, tail="drop"):
        assert dropped.steps == kept.steps[:whole]
        np.testing.assert_array_equal(dropped.labels, kept.labels[:whole])
    assert len(kept.steps) == whole + (short > 0)


@given(trajectories(min_steps=2), sizes)
def test_every_shift_keeps_the_text_and_labels_all_but_the_lead(trajectory: Trajectory, size: int) -> None:
    steps = len(trajectory.steps)
    shifted = samples(trajectory, size, stride="1", separator="|")
    assert len(shifted) == min(size, steps)
    assert shifted[0] == merge(trajectory, size, separator="|")
    for offset, sample in enumerate(shifted):
        assert "|".join(sample.steps) == "|".join(trajectory.steps)
        if offset:
            assert np.isnan(sample.labels[0])
        ends = [min(end, steps) - 1 for end in range(offset + size, steps + size, size) if end - size < steps]
        np.testing.assert_array_equal(sample.labels[offset > 0 :], trajectory.labels[ends])


@given(trajectories(), sizes, sizes)
def test_merging_twice_is_merging_by_the_product(trajectory: Trajectory, first: int, second: int) -> None:
    assert merge(merge(trajectory, first), second) == merge(trajectory, first * second)
