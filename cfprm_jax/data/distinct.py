"""Distinct steps of a batch: steps with the same question, the same preceding steps and the same text count once.

Trajectories of a record share their prefixes, so the expanded corpus repeats labels: PRM800K phase 1 has 622,860
labelled steps of which 44,947 are distinct. Two steps are one where their questions and the tokens up to their markers
are equal; to the model, too, such steps are one. So records that only share a question merge as far as their
texts agree, and granularities that are mixed in a batch merge where their windows do.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32, Int64

from cfprm_jax.data.partition import common_prefix, depth_first

if TYPE_CHECKING:  # transformers, which takes seconds
    from cfprm_jax.data.encoding import Encoded

Array = np.ndarray | jax.Array


class DistinctSteps(NamedTuple):
    """The distinct steps of a batch, each represented by its first occurrence, in the order of the batch.

    Attributes:
      nodes: trajectory * steps + step of the first occurrence of each step; of itself where padded.
      labels: at first occurrences, the mean over all labelled occurrences in the batch; NaN elsewhere.
      questions: the first trajectory of the batch that answers the same question.
    """

    nodes: Int32[Array, "trajectories steps"]
    labels: Float32[Array, "trajectories steps"]
    questions: Int32[Array, " trajectories"]


def distinct_steps(
    encoded: Sequence[Encoded], questions: Sequence[int], trajectories: int, steps: int
) -> DistinctSteps:
    """The distinct steps of a batch.

    Args:
      encoded: its trajectories, in order.
      questions: a number for each that only trajectories of the same question have.
      trajectories, steps: the padded dimensions, as those of the batch.
    """
    nodes = np.arange(trajectories * steps, dtype=np.int32).reshape(trajectories, steps)
    first = np.arange(trajectories, dtype=np.int32)
    members: dict[int, list[int]] = collections.defaultdict(list)
    for index, question in enumerate(questions):
        members[question].append(index)
    for alike in members.values():
        first[alike] = alike[0]
        if len(alike) > 1:
            _merge(nodes, [encoded[i] for i in alike], alike)
    labels = padded([solution.labels for solution in encoded], trajectories, steps)
    return DistinctSteps(nodes, mean_labels(nodes, labels), first)


def distinct_redundancy(
    encoded: Sequence[Encoded], nodes: Int32[np.ndarray, "trajectories steps"]
) -> Float32[np.ndarray, "trajectories steps"]:
    """The mean redundancy over all occurrences of each step at its first one, as the labels of DistinctSteps."""
    return mean_labels(nodes, padded([solution.redundancy for solution in encoded], *nodes.shape))


def padded(
    targets: Sequence[np.ndarray | None], trajectories: int, steps: int
) -> Float32[np.ndarray, "trajectories steps"]:
    """Targets a step of each trajectory, NaN where there is none."""
    out = np.full((trajectories, steps), np.nan, np.float32)
    for row, values in zip(out, targets, strict=False):
        if values is not None:
            row[: len(values)] = values
    return out


def mean_labels(
    nodes: Int32[np.ndarray, "trajectories steps"], labels: Float32[np.ndarray, "trajectories steps"]
) -> Float32[np.ndarray, "trajectories steps"]:
    """The mean over all labelled occurrences of each step at its first one, NaN elsewhere; see DistinctSteps."""
    known = ~np.isnan(labels)
    place = nodes[known]
    totals = np.bincount(place, labels[known].astype(np.float64), labels.size)
    counts = np.bincount(place, minlength=labels.size)
    means = np.full(labels.size, np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means.astype(np.float32).reshape(labels.shape)


def _merge(nodes: Int32[np.ndarray, "trajectories steps"], encoded: Sequence[Encoded], rows: Sequence[int]) -> None:
    """Give equal steps of these trajectories the smallest of their numbers."""
    order = depth_first([solution.tokens for solution in encoded])
    # In depth-first order what is shared with an earlier sequence is shared with all in between: a step is a new one,
    # or is on the path to the sequence before.
    path: list[tuple[int, int]] = []  # (position of the marker, number of the step), outermost first
    numbers: list[list[int]] = []
    before: Int64[np.ndarray, " length"] | None = None
    found: dict[int, int] = {}
    for place in order:
        solution = encoded[place]
        shared = 0 if before is None else common_prefix(before, solution.tokens)
        before = solution.tokens
        while path and path[-1][0] >= shared:
            path.pop()
        known = dict(path)
        row, own = nodes[rows[place]], []
        for step, position in enumerate(solution.step_positions.tolist()):
            number = known.get(position)
            if number is None:
                number = int(row[step])
                path.append((position, number))
            own.append(number)
            found[number] = min(found.get(number, number), int(row[step]))
        numbers.append(own)
        path.sort()
    for place, own in zip(order, numbers, strict=True):
        nodes[rows[place], : len(own)] = [found[number] for number in own]
