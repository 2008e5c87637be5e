"""Rounds of rollouts: a prefix is rolled once for all methods of its question, and what is missing waits."""

from __future__ import annotations

import itertools

from cfprm_jax.labelling.rounds import Rounds, in_tree_order


def walk(*prefixes):
    """A method that asks for one prefix after the other; its result is what it was told."""
    told = []
    for prefix in prefixes:
        told.append((yield [prefix])[prefix])
    return told


def test_a_prefix_is_rolled_once_for_each_question() -> None:
    rolled = []

    def roll(wanted):
        rolled.append(list(wanted))
        return [((question, prefix), f"{question}{''.join(prefix)}") for question, prefix in wanted]

    rounds = Rounds([(0, walk(("a",), ("a", "b"))), (0, walk(("a",), ("a", "c"))), (1, walk(("a",)))])
    rounds.run(roll)
    # The second method has its first prefix from the first one, and asks in the same round.
    assert rolled == [[(0, ("a",)), (1, ("a",))], [(0, ("a", "b")), (0, ("a", "c"))]]
    assert rounds.results == {0: ["0a", "0ab"], 1: ["0a", "0ac"], 2: ["1a"]} and rounds.waiting == {}


def test_methods_wait_for_what_is_rolled_elsewhere() -> None:
    def roll(wanted):
        return [(one, "known") for one in wanted if one[1] != ("b",)]

    rounds = Rounds([(0, walk(("a",), ("c",))), (0, walk(("b",), ("d",))), (0, walk())])
    rounds.run(roll)
    assert rounds.results == {0: ["known", "known"], 2: []}
    assert rounds.waiting == {1: [(0, ("b",))]}


def test_prompts_in_the_order_of_their_tree() -> None:
    """Those that begin with the same tokens stand together, and the longest of them first."""
    prompts = [(1,), (2, 1), (1, 2), (1, 2, 3), (2,), (1, 3), (1, 2)]
    ordered = [prompts[place] for place in in_tree_order(prompts)]
    assert sorted(ordered) == sorted(prompts)
    for start in {prompt[:length] for prompt in prompts for length in (1, 2)}:
        together = [prompt[: len(start)] == start for prompt in ordered]
        assert sum(begins for begins, _ in itertools.groupby(together)) == 1
        if start in ordered:
            assert len(ordered) - 1 - together[::-1].index(True) == max(
                place for place, prompt in enumerate(ordered) if prompt == start
            )
