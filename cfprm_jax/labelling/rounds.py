"""Many methods at once: what they ask for is rolled in rounds, every prefix of a question once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from cfprm_jax.labelling.rollouts import Method, Outcome, Prefix

Result = TypeVar("Result")
Wanted = tuple[int, Prefix]
"""Number of a question, and a prefix of one of its solutions."""

Roll = Callable[[Sequence[Wanted]], Iterable[tuple[Wanted, Outcome]]]
"""Rolls what it can: what is missing in its answer is rolled elsewhere, and comes in another run."""


class Rounds(Generic[Result]):
    """Runs methods until each has its result, or waits for rollouts that are made elsewhere.

    Attributes:
      results: of the methods that ended, by their place.
      waiting: places of methods that wait.
    """

    def __init__(self, methods: Sequence[tuple[int, Method[Result]]]) -> None:
        """Takes methods, each with the number of its question."""
        self._methods = methods
        self._known: dict[Wanted, Outcome] = {}
        self.results: dict[int, Result] = {}
        self.waiting: dict[int, list[Wanted]] = {}

    def run(self, roll: Roll) -> None:
        """All the rounds."""
        for place in range(len(self._methods)):
            self._advance(place, None)
        while open_ := self._open():
            found = dict(roll(open_))
            if not found:
                return
            self._known |= found
            for place, wanted in list(self.waiting.items()):
                if all(one in self._known for one in wanted):
                    self._advance(place, {prefix: self._known[question, prefix] for question, prefix in wanted})

    def _open(self) -> list[Wanted]:
        every = dict.fromkeys(one for wanted in self.waiting.values() for one in wanted)
        return [one for one in every if one not in self._known]

    def _advance(self, place: int, outcomes: Mapping[Prefix, Outcome] | None) -> None:
        question, method = self._methods[place]
        while True:
            try:
                prefixes = next(method) if outcomes is None else method.send(outcomes)
            except StopIteration as end:
                self.results[place] = end.value
                self.waiting.pop(place, None)
                return
            wanted = [(question, prefix) for prefix in prefixes]
            if not all(one in self._known for one in wanted):
                self.waiting[place] = wanted
                return
            # Another solution of the question has the same steps so far.
            outcomes = {prefix: self._known[question, prefix] for _, prefix in wanted}


def in_tree_order(prompts: Sequence[tuple[int, ...]]) -> Iterator[int]:
    """Places of prompts such that neighbours share the longest prefixes, and a longer one stands before its prefix."""
    yield from sorted(range(len(prompts)), key=lambda place: prompts[place], reverse=True)
