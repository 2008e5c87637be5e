"""sweep and bisect on seven steps by hand, and against each other on every count that is monotone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_rollouts import outcome, run

from cfprm_jax.labelling import first_error

STEPS = tuple("abcdefg")


def counts(found):
    return [None if one is None else one.successes for one in found]


def of(successes):
    return lambda prefix: outcome(successes[len(prefix) - 1])


def prefixes(*sizes):
    return [STEPS[:size] for size in sizes]


def test_sweep_stops_at_zero_or_goes_to_the_end() -> None:
    scripted = of([8, 6, 5, 2, 0, 1])
    found, rolled = run(first_error.sweep(STEPS, stop_at_zero=True), scripted)
    assert counts(found) == [8, 6, 5, 2, 0, None] and rolled == prefixes(1, 2, 3, 4, 5)
    found, rolled = run(first_error.sweep(STEPS, stop_at_zero=False), scripted)
    assert counts(found) == [8, 6, 5, 2, 0, 1] and rolled == prefixes(1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("successes", "sizes", "found"),
    [
        # The middle of [0, 7] is 3, of [3, 7] 5, of [3, 5] 4. Each prefix has all steps from the first on.
        ([8, 6, 5, 2, 0, 0], (3, 5, 4), [None, None, 5, 2, 0, None]),
        ([0, 0, 0, 0, 0, 0], (3, 1), [0, None, 0, None, None, None]),
        ([8, 8, 8, 8, 8, 8], (3, 5, 6), [None, None, 8, None, 8, 8]),
        ([8, 0, 0, 0, 0, 0], (3, 1, 2), [8, 0, 0, None, None, None]),
    ],
)
def test_bisect_by_hand(successes, sizes, found) -> None:
    result, rolled = run(first_error.bisect(STEPS), of(successes))
    assert rolled == prefixes(*sizes) and counts(result) == found


@given(st.integers(1, 70), st.data())
def test_bisect_finds_the_first_zero_of_a_sweep_in_logarithmic_time(size, data) -> None:
    error = data.draw(st.integers(1, size))
    steps = [str(number) for number in range(size)]

    def scripted(prefix):
        return outcome(3 if len(prefix) < error else 0)

    swept, all_of_them = run(first_error.sweep(steps, stop_at_zero=False), scripted)
    found, rolled = run(first_error.bisect(steps), scripted)
    places = [place for place, count in enumerate(counts(swept), 1) if count == 0] or [size]
    zeros = [place for place, count in enumerate(counts(found), 1) if count == 0] or [size]
    assert zeros[0] == places[0] == error
    assert len(all_of_them) == size - 1 and len(rolled) <= math.ceil(math.log2(size))
    assert all(one is None or one.successes == other.successes for one, other in zip(found, swept, strict=True))


def test_a_solution_of_one_step_has_nothing_to_roll() -> None:
    for method in (first_error.sweep(["a"], True), first_error.sweep(["a"], False), first_error.bisect(["a"])):
        assert run(method, outcome) == ([], [])


def test_a_prefix_without_verdicts_ends_the_search() -> None:
    found, rolled = run(first_error.bisect(STEPS), lambda prefix: outcome(0, of=0))
    assert rolled == prefixes(3) and counts(found) == [None] * 6
