"""Counts of a corpus at one granularity: trajectories, labels by class, and what they come to in tokens."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cfprm_jax.config import MOST_TOKENS, EncodingConfig
from cfprm_jax.data.trajectory import Trajectory

if TYPE_CHECKING:
    from cfprm_jax.data.encoding import Encoder

LABEL_CLASSES = ("positive", "negative", "soft", "unlabelled")
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)

# Longer than any solution: lengths are counted whole, and what --max_length cuts is worked out from them.
_NO_LIMIT = MOST_TOKENS
# Records are encoded together until so many trajectories wait, which keeps calls of the tokenizer few and memory flat.
_BATCH = 256
# A record larger than this is counted in parts, so that one record without end cannot fill the memory.
_LARGEST_RECORD = 4096


@dataclasses.dataclass
class LabelCounts:
    """Trajectories, steps, and steps by class of label: 1 positive, 0 negative, between them soft, NaN unlabelled."""

    trajectories: int = 0
    steps: int = 0
    labels: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(LABEL_CLASSES, 0))

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        labels = trajectory.labels
        positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
        unlabelled = int(np.isnan(labels).sum())
        self.trajectories += 1
        self.steps += len(labels)
        self.labels["positive"] += positive
        self.labels["negative"] += negative
        self.labels["unlabelled"] += unlabelled
        self.labels["soft"] += len(labels) - positive - negative - unlabelled

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return dataclasses.asdict(self)


class TokenCounts:
    """Lengths in tokens, what a maximum length cuts, and how many tokens are shared prefixes.

    Records must be added whole and in order: a token is distinct if no other trajectory of its record has it after the
    same tokens. Distinct tokens are those that prefix-tree packing has to compute.
    """

    def __init__(self, encoder: Encoder, max_length: int) -> None:
        """encoder must not cut anything: see :func:`unlimited`."""
        self._encoder = encoder
        self._max_length = max_length
        self._records: list[list[Trajectory]] = []
        self._waiting = 0
        self._lengths: collections.Counter[int] = collections.Counter()
        self._expanded = 0
        self._distinct = 0
        self._truncated = 0
        self._windows_cut = 0
        self._no_window = 0
        self._no_label = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory."""
        last = self._records[-1] if self._records else None
        if last is None or last[0].source != trajectory.source or len(last) >= _LARGEST_RECORD:
            if self._waiting >= _BATCH:
                self._flush()
            self._records.append([])
        self._records[-1].append(trajectory)
        self._waiting += 1

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report, with everything added so far.

        "lengths" are of whole solutions, before any cut; "expanded" and "distinct" are after the cut at max_length.
        """
        self._flush()
        redundant = 1 - self._distinct / self._expanded if self._expanded else 0.0
        return {
            "max_length": self._max_length,
            "lengths": {str(rank): length for rank, length in zip(PERCENTILES, self._percentiles(), strict=True)},
            "truncated": self._truncated,
            "windows_cut": self._windows_cut,
            "skipped": {"no window fits": self._no_window, "no label left": self._no_label},
            "expanded": self._expanded,
            "distinct": self._distinct,
            "redundant_prefix_share": round(redundant, 6),
        }

    def _percentiles(self) -> list[int]:
        """The smallest length that at least the given share of the trajectories do not exceed."""
        lengths = sorted(self._lengths)
        upto = np.cumsum([self._lengths[length] for length in lengths])
        if not lengths:
            return [0] * len(PERCENTILES)
        ranks = [max(-(-rank * int(upto[-1]) // 100), 1) for rank in PERCENTILES]
        return [lengths[int(np.searchsorted(upto, rank))] for rank in ranks]

    def _flush(self) -> None:
        """Encode and count the records that wait."""
        waiting = [trajectory for record in self._records for trajectory in record]
        encoded = iter(self._encoder.encode_many([(t.question, t.steps, t.labels) for t in waiting]))
        for record in self._records:
            kept = []
            for _ in record:
                solution = next(encoded)
                self._lengths[len(solution.tokens)] += 1
                windows = int(np.searchsorted(solution.step_positions, self._max_length))
                cut = len(solution.step_positions) - windows
                self._truncated += cut > 0
                self._windows_cut += cut
                if not windows:
                    self._no_window += 1
                elif np.isnan(solution.labels[:windows]).all():
                    self._no_label += 1
                else:
                    kept.append(solution.tokens[: solution.step_positions[windows - 1] + 1])
            self._expanded += sum(map(len, kept))
            self._distinct += distinct_prefix_tokens(kept)
        self._records, self._waiting = [], 0


def unlimited(encoding: EncodingConfig) -> EncodingConfig:
    """The same encoding without a maximum length."""
    return dataclasses.replace(encoding, max_length=_NO_LIMIT)


def distinct_prefix_tokens(sequences: Sequence[np.ndarray]) -> int:
    """Nodes of the prefix tree of int32 token sequences.

    In lexicographic order (of whatever order of tokens: here that of their bytes) a sequence shares the most with the
    one before it, so its new nodes are what it has beyond that common prefix.
    """
    nodes = 0
    previous = np.empty(0, np.int32)
    for tokens in sorted(sequences, key=np.ndarray.tobytes):
        length = min(len(tokens), len(previous))
        differs = tokens[:length] != previous[:length]
        nodes += len(tokens) - (int(differs.argmax()) if differs.any() else length)
        previous = tokens
    return nodes
