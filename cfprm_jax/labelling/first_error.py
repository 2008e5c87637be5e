"""Rollouts of one solution: from all of its steps (Math-Shepherd), or by binary search for the first error (OmegaPRM).

The last step needs no rollout: its count is whether the solution itself is correct. Both methods give an outcome for
each step before it, None where it was not rolled.
"""

from __future__ import annotations

from collections.abc import Sequence

from cfprm_jax.labelling.rollouts import Method, Outcome

Steps = Sequence[str]


def sweep(steps: Steps, stop_at_zero: bool) -> Method[list[Outcome | None]]:
    """From every step but the last.

    Args:
      stop_at_zero: steps after the first one without a success are not rolled; one step a round then.
    """
    prefixes = [tuple(steps[:count]) for count in range(1, len(steps))]
    found: list[Outcome | None] = [None] * len(prefixes)
    if not stop_at_zero:
        outcomes = (yield prefixes) if prefixes else {}
        return [outcomes[prefix] for prefix in prefixes]
    for index, prefix in enumerate(prefixes):
        found[index] = outcome = (yield [prefix])[prefix]
        if outcome.successes == 0:
            break
    return found


def bisect(steps: Steps) -> Method[list[Outcome | None]]:
    """Binary search for the first error of an incorrect solution, in at most ceil(log2(len(steps))) evaluations.

    Assumes that a step after one without successes has none either. Ends early at a prefix that cannot be rolled or
    whose rollouts have no verdict.
    """
    found: list[Outcome | None] = [None] * (len(steps) - 1)
    good, bad = 0, len(steps)  # steps of the longest prefix with a success, and of the shortest without
    while bad - good > 1:
        middle = (good + bad) // 2
        prefix = tuple(steps[:middle])
        found[middle - 1] = outcome = (yield [prefix])[prefix]
        if outcome.successes is None:
            break
        good, bad = (middle, bad) if outcome.successes else (good, middle)
    return found


def nothing(steps: Steps) -> Method[list[Outcome | None]]:
    """No rollouts."""
    yield from ()
    return [None] * (len(steps) - 1)
