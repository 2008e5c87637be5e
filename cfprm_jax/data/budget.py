"""Token budget: a pass is cut into steps that compute at most --batch_tokens tokens.

The tokens of a step are those of its trajectories. With --packing=tree, what trajectories of one record share counts
once; with the other packings, every trajectory counts whole. Not counted are padding, the prefix that a tree repeats
where it is cut between rows, and (as a saving) the system prompt that records in one row share.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """The cost of trajectories in tokens, with those of each record in depth-first order of their common tree.

    Attributes:
      lengths: tokens of each.
      shared: tokens that each shares with the one before it in its record; 0 for the first, and for all where nothing
        is shared.
    """

    lengths: Int64[np.ndarray, " trajectories"]
    shared: Int64[np.ndarray, " trajectories"]


def cut(
    places: Int64[np.ndarray, " trajectories"],
    units: Int64[np.ndarray, " units"],
    costs: Costs,
    budget: int,
) -> Int64[np.ndarray, " batches+1"]:
    """The bounds of the batches of a pass: their begins, and the end.

    A unit (a record, a run of its trajectories, or one trajectory) that no longer fits begins the next batch. One that
    alone is larger than the budget is spread, trajectory by trajectory, from the batch at hand on; a trajectory that
    alone is larger is a batch of its own.

    Args:
      places: the trajectories in the order of the pass, as places in costs.
      units: trajectories of each unit, in the order of the pass.
      budget: tokens of a batch.
    """
    step = _Step(costs)
    bounds, position = [0], 0
    order = places.tolist()

    def close(at: int) -> None:
        bounds.append(at)
        step.clear()

    for size in units.tolist():
        unit = order[position : position + size]
        if size > 1 and _alone(unit, costs) > budget:
            parts: Sequence[list[int]] = [[place] for place in unit]
        else:
            parts = [unit]
        for part in parts:
            if not step.add(part, budget) and step.members:
                close(position)
                step.add(part, budget)
            if not step.members:  # larger than the budget: it is a step alone
                step.add(part, None)
            position += len(part)
    if position > bounds[-1]:
        bounds.append(position)
    return np.array(bounds, np.int64)


def _alone(unit: Sequence[int], costs: Costs) -> int:
    """Tokens of a unit, whose trajectories are neighbours in depth-first order."""
    first, last = unit[0], unit[-1] + 1
    new = costs.lengths[first:last] - costs.shared[first:last]
    return int(new.sum() + costs.shared[first])


class _Step:
    """The trajectories of a step, and their joint cost."""

    def __init__(self, costs: Costs) -> None:
        self._lengths = costs.lengths.tolist()
        self._shared = costs.shared
        self._one_before = costs.shared.tolist()
        # A record's first shares nothing, and so may others: what they begin has nothing in common with what is before.
        self._record = np.cumsum(costs.shared == 0).tolist()
        self.members: list[int] = []
        self._tokens = 0

    def clear(self) -> None:
        """Remove all trajectories."""
        self.members, self._tokens = [], 0

    def add(self, part: Sequence[int], budget: int | None) -> bool:
        """Add all of part if they fit into the budget (None is unbounded), or nothing."""
        tokens = self._tokens
        for added, place in enumerate(part):
            at = bisect.bisect(self.members, place)
            common = self._common(self.members[at - 1], place) if at else 0
            if at < len(self.members):
                common = max(common, self._common(place, self.members[at]))
            tokens += self._lengths[place] - common
            if budget is not None and tokens > budget:
                for other in part[:added]:
                    self.members.pop(bisect.bisect_left(self.members, other))
                return False
            self.members.insert(at, place)
        self._tokens = tokens
        return True

    def _common(self, first: int, second: int) -> int:
        """Tokens that two trajectories share: the least of what neighbours between them do, 0 across records."""
        if second == first + 1:
            return self._one_before[second]
        if self._record[first] != self._record[second]:
            return 0
        return int(self._shared[first + 1 : second + 1].min())
