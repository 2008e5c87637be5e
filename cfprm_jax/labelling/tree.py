"""OmegaPRM's search tree of one question (arXiv 2406.06592), by divide and conquer over incorrect rollouts.

A node is a prefix with its rollouts; MC(s) is the rate of its successes. The pool holds the incorrect rollouts r of
nodes s with 0 < MC(s) < 1. A search takes the rollout with the largest Q(s, r) + U(s) out of the pool,

    Q(s, r) = alpha^(1 - MC(s)) * beta^(len(r) / L),   len(r) in tokens
    U(s)    = c_puct * sqrt(sum over all nodes of N) / (1 + N(s))

finds its first error by binary search, adds each prefix that this evaluates to the tree and its incorrect rollouts to
the pool, and adds 1 to N(s) of the node that it was taken from. Values are not backed up. Of equals the first one is
taken. The search ends after --searches, or when the pool is empty.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from cfprm_jax.labelling.rollouts import Method, Outcome, Prefix, Rollout

Cut = Callable[[Prefix, str], list[str]]
"""The pieces of a continuation of a prefix."""


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """The constants of the search; the defaults are the paper's."""

    alpha: float = 0.5
    beta: float = 0.9
    length: float = 500.0
    c_puct: float = 0.125
    searches: int = 100


@dataclasses.dataclass
class Node:
    """A prefix in the tree, with its rollouts.

    Attributes:
      visits: N(s), searches that took a rollout from it.
      end: whether it is the whole of a rollout, whose answer is its only count; nothing was rolled from it.
    """

    prefix: Prefix
    outcome: Outcome
    visits: int = 0
    end: bool = False

    @property
    def wrong(self) -> bool:
        """Whether no rollout from here succeeds."""
        return self.outcome.successes == 0


@dataclasses.dataclass(frozen=True)
class Selected:
    """A search: the node and the number of the rollout that it took, and the pieces of that rollout."""

    prefix: Prefix
    rollout: int
    pieces: int


@dataclasses.dataclass
class SearchTree:
    """The result of a search; the root, the question itself, is the first of the nodes."""

    nodes: dict[Prefix, Node] = dataclasses.field(default_factory=dict)
    selected: list[Selected] = dataclasses.field(default_factory=list)

    @property
    def root(self) -> Node:
        """The node of the question itself."""
        return self.nodes[()]

    def parent(self, prefix: Prefix) -> Node:
        """The deepest node above a prefix that has verdicts, or else the root."""
        return next((node for node in reversed(self._above(prefix)) if node.outcome.successes is not None), self.root)

    def _above(self, prefix: Prefix) -> list[Node]:
        """The nodes above a prefix, the root first."""
        return [self.nodes[prefix[:size]] for size in range(len(prefix)) if prefix[:size] in self.nodes]

    def remaining(self, prefix: Prefix) -> int | None:
        """Steps of the shortest successful rollout from a prefix that the tree has, through its other nodes too."""
        known = [
            node.outcome.remaining + len(node.prefix) - len(prefix)
            for node in self.nodes.values()
            if node.prefix[: len(prefix)] == prefix and node.outcome.remaining is not None
        ]
        return min(known, default=None)

    def _after_error(self, prefix: Prefix) -> bool:
        return any(node.wrong for node in self._above(prefix))

    def edges(self) -> list[Node]:
        """Every node with verdicts but the root and those after a first error, in depth-first order."""
        kept = [
            node
            for prefix, node in self.nodes.items()
            if prefix and node.outcome.successes is not None and not self._after_error(prefix)
        ]
        # Prefixes before their continuations, siblings in the order of the search.
        places: dict[Prefix, int] = {}
        for prefix in self.nodes:
            for size in range(1, len(prefix) + 1):
                places.setdefault(prefix[:size], len(places))

        def order(node: Node) -> list[int]:
            return [places[node.prefix[:size]] for size in range(1, len(node.prefix) + 1)]

        return sorted(kept, key=order)

    def violations(self) -> int:
        """Nodes with a success after one without any; they are no edges."""
        return sum(bool(node.outcome.successes) and self._after_error(prefix) for prefix, node in self.nodes.items())

    def leaves(self) -> list[Node]:
        """The edges that have no child."""
        edges = self.edges()
        inner = {self.parent(node.prefix).prefix for node in edges}
        return [node for node in edges if node.prefix not in inner]


def score(node: Node, rollout: Rollout, visits: int, settings: TreeSettings) -> float:
    """Q(s, r) + U(s), for the sum of the visits of all nodes."""
    rate = node.outcome.rate or 0.0
    quality = settings.alpha ** (1 - rate) * settings.beta ** (rollout.tokens / settings.length)
    return quality + settings.c_puct * math.sqrt(visits) / (1 + node.visits)


def search(
    settings: TreeSettings,
    cutter: Callable[[Outcome], Cut],
    grows: Callable[[Outcome], bool] = lambda first: True,
) -> Method[SearchTree]:
    """Grows the tree of one question; rollouts must keep their texts.

    Args:
      cutter: how rollouts are cut into pieces, given the first ones.
      grows: whether to search at all, given the first ones; otherwise the tree is its root.
    """
    tree = SearchTree()
    pool: list[tuple[Node, int]] = []

    def add(prefix: Prefix, outcome: Outcome) -> None:
        node = tree.nodes[prefix] = Node(prefix, outcome)
        if 0 < (outcome.rate or 0) < 1:
            # Without a verdict a rollout is neither; a cut one has no end in which an error could be searched for.
            wrong = [i for i, rollout in enumerate(outcome.rollouts) if rollout.correct is False and not rollout.cut]
            pool.extend((node, index) for index in wrong)

    add((), (yield [()])[()])
    if not grows(tree.root.outcome):
        return tree
    cut = cutter(tree.root.outcome)
    while pool and len(tree.selected) < settings.searches:
        visits = sum(node.visits for node in tree.nodes.values())
        scores = [score(node, node.outcome.rollouts[index], visits, settings) for node, index in pool]
        node, index = pool.pop(scores.index(max(scores)))
        pieces = cut(node.prefix, node.outcome.rollouts[index].text or "")
        tree.selected.append(Selected(node.prefix, index, len(pieces)))
        good, bad = 0, len(pieces)
        while bad - good > 1:
            middle = (good + bad) // 2
            prefix = (*node.prefix, *pieces[:middle])
            if prefix not in tree.nodes:
                add(prefix, (yield [prefix])[prefix])
            successes = tree.nodes[prefix].outcome.successes
            if successes is None:
                break
            good, bad = (middle, bad) if successes else (good, middle)
        else:
            if pieces and bad == len(pieces):
                # The end of the rollout is the first error, and is known to be wrong.
                tree.nodes.setdefault((*node.prefix, *pieces), _end(node, index, pieces))
        node.visits += 1
    return tree


def _end(node: Node, index: int, pieces: list[str]) -> Node:
    rollout = dataclasses.replace(node.outcome.rollouts[index], text=None, steps=0, tokens=0)
    return Node((*node.prefix, *pieces), Outcome((rollout,)), end=True)
