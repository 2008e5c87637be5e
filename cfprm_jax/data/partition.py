"""Partition of a batch: the forest of its sequences, and its division into rows of a given length.

Sequences that begin alike form trees. Sorted as sequences of integers they stand in depth-first order of the trie of
their prefixes, and the longest common prefixes of neighbours hold its whole shape, so nothing here builds a node a
token. A tree that is divided between two rows repeats the path from its root to the cut, which is what a cut costs.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, Int64

# Sequences that differ within this many tokens of the prefix that all of them share (the system prompt) count as
# different trees: keeping them together would save less than their freedom to fill rows does. Where the longest
# sequence is short, so is its prompt, and an eighth of it is what may be repeated.
_CHEAP_CUT, _CHEAP_SHARE = 16, 8
# Trees among which the ones that fill a row are sought; their sums already hit every room to the token.
_OFFERED = 48


@dataclasses.dataclass(frozen=True, eq=False)
class Forest:
    """The sequences of a batch in depth-first order, and the trees that they form.

    Attributes:
      order: index of each sequence in the batch, lexicographic by tokens.
      lengths: tokens of each sequence, in that order.
      shared: tokens that each shares with the one before it (0 for the first).
      common: tokens that all of them share, when there is more than one tree.
      trees: the parts that are divided only when they must be.
    """

    order: Int64[np.ndarray, " sequences"]
    lengths: Int64[np.ndarray, " sequences"]
    shared: Int64[np.ndarray, " sequences"]
    common: int
    trees: tuple[Tree, ...]

    @property
    def size(self) -> int:
        """Tokens that a single row with all the sequences would hold: the distinct prefixes."""
        return int((self.lengths - self.shared).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max(initial=0))


@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """Sequences with a common beginning, in depth-first order with the heaviest branch of every node last.

    That order puts the branches that leave near the root first, so that a cut after any of them moves much and repeats
    little.

    Attributes:
      members: places in the forest's order.
      new: tokens that each adds to those before it; the first counts its whole path.
      shared: tokens that each shares with the one before it; what a cut there repeats.
    """

    members: Int64[np.ndarray, " sequences"]
    new: Int64[np.ndarray, " sequences"]
    shared: Int64[np.ndarray, " sequences"]

    @property
    def size(self) -> int:
        """Tokens of the tree."""
        return int(self.new.sum())

    def cut(self, place: int) -> tuple[Tree, Tree]:
        """The sequences before place, and those from place on with the path that they repeat."""
        rest = self.new[place:].copy()
        rest[0] += self.shared[place]
        head = Tree(self.members[:place], self.new[:place], self.shared[:place])
        return head, Tree(self.members[place:], rest, self.shared[place:])


def common_prefix(first: Int32[np.ndarray, " a"], second: Int32[np.ndarray, " b"]) -> int:
    """Number of leading tokens in which two sequences agree."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length


def depth_first(sequences: Sequence[Int32[np.ndarray, " length"]]) -> list[int]:
    """Indices of the sequences in depth-first order of their trie: lexicographic, equal ones in the order given."""
    # Big-endian bytes of non-negative integers compare as the integers do, and compare at the speed of memcmp.
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def shared_forest(sequences: Sequence[Int32[np.ndarray, " length"]]) -> Forest:
    """The forest in which sequences share their common prefixes."""
    order = depth_first(sequences)
    lengths = np.array([len(sequences[i]) for i in order], np.int64)
    shared = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        shared[place] = common_prefix(sequences[order[place - 1]], sequences[order[place]])
    common = int(shared[1:].min()) if len(order) > 1 else 0
    # The first shares nothing with one before it and so begins a tree.
    cheap = min(_CHEAP_CUT, int(lengths.max(initial=0)) // _CHEAP_SHARE)
    bounds = [*np.flatnonzero(shared <= common + cheap).tolist(), len(order)]
    trees = tuple(_tree(lengths, shared, a, b) for a, b in itertools.pairwise(bounds))
    return Forest(np.array(order, np.int64), lengths, shared, common if len(trees) > 1 else 0, trees)


def separate_forest(sequences: Sequence[Int32[np.ndarray, " length"]]) -> Forest:
    """The forest in which every sequence is a tree of its own and nothing is shared."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    nothing = np.zeros(len(lengths), np.int64)
    trees = tuple(Tree(np.array([i]), lengths[i : i + 1], nothing[:1]) for i in range(len(lengths)))
    return Forest(np.arange(len(lengths)), lengths, nothing, 0, trees)


def longest_first(
    lengths: Int64[np.ndarray, " sequences"], shared: Int64[np.ndarray, " sequences-1"]
) -> tuple[Int64[np.ndarray, " sequences"], Int64[np.ndarray, " sequences-1"]]:
    """Sequences in the depth-first order that takes the deepest branch of every node first.

    A tree then begins with its longest path in one piece, and what branches off it follows. So the tokens that a token
    sees lie together, which attention by blocks is after: its own branch, and the beginning of that path.

    Args:
      lengths: tokens of the sequences, in any depth-first order.
      shared: tokens that each after the first shares with the one before it.

    Returns:
      the places of the sequences in the new order, and what each after the first shares with the one before it there.
    """
    # A branch: (tokens to its deepest end, its sequences, what each of them after the first shares with the last).
    Branch = tuple[int, list[int], list[int]]
    open_nodes: list[tuple[int, list[Branch]]] = []
    branch: Branch = (0, [], [])
    for place, (length, below) in enumerate(zip(lengths.tolist(), [*shared.tolist(), -1], strict=True)):
        branch = (length, [place], [])
        while open_nodes and open_nodes[-1][0] > below:
            depth, branches = open_nodes.pop()
            branches.append(branch)
            # The sort is stable: branches as deep keep the order given.
            branches.sort(key=lambda one: -one[0])
            members = list(itertools.chain.from_iterable(one[1] for one in branches))
            shares = list(itertools.chain.from_iterable([depth, *one[2]] for one in branches))[1:]
            branch = (branches[0][0], members, shares)
        if open_nodes and open_nodes[-1][0] == below:
            open_nodes[-1][1].append(branch)
        elif below >= 0:
            open_nodes.append((below, [branch]))
    return np.array(branch[1], np.int64), np.array(branch[2], np.int64)


def divide(forest: Forest, rows: int, length: int) -> list[Int64[np.ndarray, " sequences"]] | None:
    """Partition the forest into at most `rows` rows of `length` tokens: each row's places in the forest's order.

    Whole trees fill one row after another as far as their sizes add up; if that takes more rows, trees that fit nowhere
    are cut where that repeats least. None when this finds no division, which does not prove that there is none.
    """
    if forest.longest > length or forest.size > rows * length:
        return None
    if forest.size <= length:
        return [np.arange(len(forest.order))] if len(forest.order) else []
    rooms = _whole_trees(forest, rows, length)
    if rooms is None:
        rooms = _cut_trees(forest, rows, length)
    return (
        None if rooms is None else [np.sort(np.concatenate([tree.members for tree in room])) for room in rooms if room]
    )


def _whole_trees(forest: Forest, rows: int, length: int) -> list[list[Tree]] | None:
    """Rows of uncut trees: each takes the largest tree left and the trees that together fill it best."""
    capacity = length - forest.common
    left = sorted(forest.trees, key=lambda tree: tree.size)
    sizes = [tree.size - forest.common for tree in left]
    if not left or sizes[-1] > capacity:
        return None
    filled: list[list[Tree]] = []
    while left:
        if len(filled) == rows:
            return None
        row, room = [left.pop()], capacity - sizes.pop()
        # Sorted by size: the trees beyond this place do not fit, and a choice among some tens of the others is plenty.
        fitting = bisect.bisect_right(sizes, room)
        offered = range(0, fitting, -(-fitting // _OFFERED) or 1)
        # Bit t of reach[i]: a subset of the first i trees offered has t tokens in total.
        within = (1 << (room + 1)) - 1
        reach = [1]
        for index in offered:
            reach.append(reach[-1] | (reach[-1] << sizes[index]) & within)
        total = reach[-1].bit_length() - 1
        for number in range(len(offered) - 1, -1, -1):
            if not (reach[number] >> total) & 1:
                index = offered[number]
                total -= sizes.pop(index)
                row.append(left.pop(index))
        filled.append(row)
    return filled


def _cut_trees(forest: Forest, rows: int, length: int) -> list[list[Tree]] | None:
    """Rows by best fit decreasing, where a tree that fits nowhere is cut."""
    common = forest.common
    todo = sorted(forest.trees, key=lambda tree: tree.size)
    loads = np.full(rows, common, np.int64)
    filled: list[list[Tree]] = [[] for _ in range(rows)]
    cuts = 0
    while todo:
        tree = todo.pop()
        after = loads + (tree.size - common)
        fits = after <= length
        if fits.any():
            row = int(np.where(fits, after, -1).argmax())
            loads[row] = after[row]
            filled[row].append(tree)
            continue
        place = _cheapest_cut(tree, length - loads + common)
        cuts += 1
        # Every cut repeats a path; a division that needs many has too little room to be worth looking for.
        if place is None or cuts > 4 * rows + 8:
            return None
        todo += tree.cut(place)
        todo.sort(key=lambda tree: tree.size)
    return filled


def _cheapest_cut(tree: Tree, room: Int64[np.ndarray, " rows"]) -> int | None:
    """The cut of a tree that is larger than every row.

    If the two roomiest rows can take the two parts: the cut that repeats least. Otherwise the one that fills the
    roomiest row most, less what it repeats; the rest is divided again.
    """
    if len(tree.members) < 2:
        return None
    order = np.sort(room)[::-1]
    first, second = int(order[0]), int(order[1]) if len(order) > 1 else -1
    head = np.cumsum(tree.new)[:-1]
    repeated = tree.shared[1:]
    tail = tree.size - head + repeated
    both = ((head <= first) & (tail <= second)) | ((head <= second) & (tail <= first))
    if both.any():
        return int(np.where(both, repeated, np.iinfo(np.int64).max).argmin()) + 1
    one = np.maximum(np.where(head <= first, head, -1), np.where(tail <= first, tail, -1))
    if (one < 0).all():
        return None
    return int(np.where(one < 0, np.iinfo(np.int64).min, one - repeated).argmax()) + 1


def _tree(lengths: np.ndarray, shared: np.ndarray, start: int, stop: int) -> Tree:
    """Sequences start..stop of the sorted ones as a tree whose nodes have their heaviest branch last."""
    # A branch: (tokens counted from the root, its sequences, what each of them after the first shares with the last).
    Branch = tuple[int, list[int], list[int]]
    open_nodes: list[tuple[int, list[Branch]]] = []
    branch: Branch = (0, [], [])
    for place in range(start, stop):
        branch = (int(lengths[place]), [place], [])
        below = int(shared[place + 1]) if place + 1 < stop else -1
        while open_nodes and open_nodes[-1][0] > below:
            depth, branches = open_nodes.pop()
            branch = _join(depth, [*branches, branch])
        if open_nodes and open_nodes[-1][0] == below:
            open_nodes[-1][1].append(branch)
        elif below >= 0:
            open_nodes.append((below, [branch]))
    _, members, shares = branch
    common = np.array([0, *shares], np.int64)
    return Tree(np.array(members, np.int64), lengths[members] - common, common)


def _join(depth: int, branches: list[tuple[int, list[int], list[int]]]) -> tuple[int, list[int], list[int]]:
    # A sequence that ends at this node adds nothing, so it comes first in depth-first order.
    branches.sort(key=lambda branch: branch[0])
    size, members, shares = branches[0]
    members, shares = list(members), list(shares)
    for tokens, others, other_shares in branches[1:]:
        size += tokens - depth
        members += others
        shares += [depth, *other_shares]
    return size, members, shares
