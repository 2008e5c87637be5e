"""Scripted outcomes: results that a method receives, and a record of the prefixes that it rolled."""

from __future__ import annotations

from cfprm_jax.labelling.rollouts import Outcome, Rollout


def outcome(successes: int, of: int = 8, tokens: int = 10, steps: int = 1, texts=None) -> Outcome:
    """Successes first."""
    return Outcome(
        tuple(
            Rollout(number < successes, tokens, False, steps, None if texts is None else texts[number])
            for number in range(of)
        )
    )


def run(method, answer):
    """The result of a method whose prefixes have the outcomes that answer gives, and the prefixes in order."""
    rolled = []
    try:
        wanted = next(method)
        while True:
            rolled += wanted
            wanted = method.send({prefix: answer(prefix) for prefix in wanted})
    except StopIteration as end:
        return end.value, rolled
