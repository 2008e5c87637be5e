"""Which token sequences have their keys and values in a pool of slots: a compressed prefix tree, least recently used.

A node holds a run of tokens and the slot of each; its children begin with different tokens. What is used together has
one clock value, and nothing of the current value is evicted, so that slots which a caller has just looked up stay
valid until the next :meth:`PrefixTree.tick`. Only leaves are evicted, oldest first: a token never outlives its prefix.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32


class _Node:
    """A run of tokens and their slots."""

    __slots__ = ("children", "parent", "slots", "tokens", "used")

    def __init__(self, tokens: np.ndarray, slots: np.ndarray, parent: _Node | None, used: int) -> None:
        self.tokens, self.slots, self.parent, self.used = tokens, slots, parent, used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """The slots of a pool by the token sequences that they belong to. Not for several threads at once.

    Attributes:
      capacity: slots of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node(np.zeros(0, np.int32), np.zeros(0, np.int32), None, 0)
        self._free = np.arange(self.capacity, dtype=np.int32)[::-1]
        self._clock = 0

    @property
    def held(self) -> int:
        """Tokens that are in the pool."""
        return self.capacity - len(self._free)

    def tick(self) -> None:
        """Begin a new use: what was looked up before may be evicted from now on."""
        self._clock += 1

    def match(self, tokens: Int32[np.ndarray, " length"]) -> Int32[np.ndarray, " matched"]:
        """The slots of the longest prefix of tokens that is held, which counts as used now."""
        found = [node.slots for node, _ in self._use(tokens)]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def allocate(self, count: int) -> Int32[np.ndarray, " allocated"]:
        """Up to count free slots; leaves that were not used since :meth:`tick` are evicted for them, oldest first."""
        if count > len(self._free):
            self._evict(count - len(self._free))
        taken, self._free = np.split(self._free, [max(0, len(self._free) - count)])[::-1]
        return taken

    def release(self, slots: Int32[np.ndarray, " count"]) -> None:
        """Give back allocated slots that nothing was inserted for."""
        self._free = np.concatenate([self._free, slots.astype(np.int32)])

    def insert(self, tokens: Int32[np.ndarray, " length"], slots: Int32[np.ndarray, " length"]) -> int:
        """Hold a sequence. What is held of it already keeps its slots.

        Returns:
          the length of that prefix: only slots from there on are used.
        """
        parent, length = self._root, 0
        for node, shared in self._use(tokens):
            parent, length = node, length + shared
        if length < len(tokens):
            child = _Node(tokens[length:].copy(), slots[length:].copy(), parent, self._clock)
            parent.children[int(tokens[length])] = child
        return length

    def _use(self, tokens: np.ndarray) -> Iterator[tuple[_Node, int]]:
        """The nodes along tokens, which count as used now, and their lengths; one that matches in part is split."""
        node, length = self._root, 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                return
            rest = tokens[length : length + len(child.tokens)]
            same = child.tokens[: len(rest)] == rest
            shared = len(rest) if same.all() else int(np.argmin(same))
            node = child if shared == len(child.tokens) else self._split(child, shared)
            node.used = self._clock
            length += shared
            yield node, shared

    def _split(self, node: _Node, place: int) -> _Node:
        """Cut a node in two; the first part."""
        assert node.parent is not None
        head = _Node(node.tokens[:place], node.slots[:place], node.parent, node.used)
        node.parent.children[int(head.tokens[0])] = head
        node.tokens, node.slots, node.parent = node.tokens[place:], node.slots[place:], head
        head.children[int(node.tokens[0])] = node
        return head

    def _evict(self, count: int) -> None:
        number = itertools.count()  # nodes have no order of their own
        leaves = [(node.used, next(number), node) for node in self._leaves() if node.used < self._clock]
        heapq.heapify(leaves)
        freed: list[np.ndarray] = []
        while leaves and count > 0:
            _, _, node = heapq.heappop(leaves)
            # The end of a leaf first: what is left of it is still a prefix.
            kept = max(0, len(node.tokens) - count)
            freed.append(node.slots[kept:])
            count -= len(node.slots) - kept
            if kept:
                node.tokens, node.slots = node.tokens[:kept].copy(), node.slots[:kept].copy()
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.tokens[0])]
            if parent is not self._root and not parent.children and parent.used < self._clock:
                heapq.heappush(leaves, (parent.used, next(number), parent))
        self._free = np.concatenate([self._free, *freed])

    def _leaves(self) -> Iterator[_Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            if node.children:
                waiting.extend(node.children.values())
            else:
                yield node
