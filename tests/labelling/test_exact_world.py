"""Hard and soft labels in the synthetic world, whose labels and success probabilities are exact."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def estimates():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("label_estimates")
        for name in ("label_estimates", "common"):
            sys.modules.pop(name, None)


def test_success_is_exact_by_enumeration(estimates) -> None:
    slip, moves = 0.3, 3
    for right in (True, False):
        total = 0.0
        for shifts in itertools.product(range(7), repeat=moves):
            probability = 1.0
            for shift in shifts:
                probability *= 1 - slip if shift == 0 else slip / 6
            total += probability * ((sum(shifts) + (0 if right else 2)) % 7 == 0)
        assert estimates.success(right, moves, slip) == pytest.approx(total, rel=1e-12)


def test_hard_grows_too_kind_and_soft_converges(estimates) -> None:
    figures = estimates.measure(estimates.EstimatesConfig(problems=120))
    rows = figures["rows"]
    kind = [row["hard_wrong_called_right"] for row in rows]
    assert kind == sorted(kind) and kind[0] < 0.1 < 0.5 < kind[-1]
    errors = [row["soft_squared_error"] for row in rows]
    assert errors == sorted(errors, reverse=True)
    # The variance of a mean of N: 64 rollouts have a 64th of one's.
    assert errors[0] / errors[-1] == pytest.approx(64, rel=0.25)
    assert rows[3]["hard_accuracy"] > rows[-1]["hard_accuracy"]
    # Sharing of prefixes apart, bisection costs at most its bound and is right wherever its assumption holds.
    assert figures["same_first_zero"] == figures["monotone_solutions"] > 0.5 * figures["solutions"]
    assert figures["rollouts_of_bisect_to_sweep"] <= figures["bound"]
