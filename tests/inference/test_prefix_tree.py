"""The prefix tree against a dictionary of prefixes, and what is evicted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.inference.prefix_tree import PrefixTree


def ids(*tokens):
    return np.array(tokens, np.int32)


def put(tree, *tokens):
    """Hold a sequence as a scorer does."""
    sequence = ids(*tokens)
    held = tree.match(sequence)
    slots = np.concatenate([held, tree.allocate(len(sequence) - len(held))])
    assert tree.insert(sequence[: len(slots)], slots) == len(held)
    return slots


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12),
    st.integers(0, 12),
)
def test_a_slot_belongs_to_one_prefix_and_all_are_accounted_for(sequences, capacity) -> None:
    tree = PrefixTree(capacity)
    content: dict[int, tuple[int, ...]] = {}  # what a scorer would have written into each slot
    for tokens in sequences:
        tree.tick()
        before = len(tree.match(ids(*tokens)))
        slots = put(tree, *tokens)
        for depth in range(before, len(slots)):
            content[int(slots[depth])] = tuple(tokens[: depth + 1])
        assert len(slots) == min(len(tokens), capacity)
        for other in sequences:
            for depth, slot in enumerate(tree.match(ids(*other))):
                assert content[int(slot)] == tuple(other[: depth + 1])
        held = {int(slot) for other in sequences for slot in tree.match(ids(*other))}
        assert tree.held == len(held) <= capacity


def test_the_least_recently_used_leaves_first_and_from_its_end() -> None:
    tree = PrefixTree(6)
    put(tree, 1, 2, 3)
    tree.tick()
    put(tree, 1, 2, 4)
    tree.tick()
    put(tree, 7, 8)
    assert tree.held == 6
    tree.tick()
    assert len(tree.match(ids(1, 2, 4))) == 3
    put(tree, 9)
    assert [len(tree.match(ids(*tokens))) for tokens in ((1, 2, 3), (1, 2, 4), (7, 8), (9,))] == [2, 3, 2, 1]


def test_what_is_in_use_is_not_evicted() -> None:
    tree = PrefixTree(4)
    put(tree, 1, 2, 3)
    assert len(tree.allocate(3)) == 1
    tree.tick()
    assert len(tree.allocate(3)) == 3
