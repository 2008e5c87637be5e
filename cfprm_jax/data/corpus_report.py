"""Counts of a corpus at one granularity: trajectories, labels by class, and tokens."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cfprm_jax.config import MOST_TOKENS, EncodingConfig
from cfprm_jax.data.trajectory import LARGEST_RECORD, Trajectory

if TYPE_CHECKING:
    from cfprm_jax.data.encoding import Encoder

LABEL_CLASSES = ("positive", "negative", "soft", "unlabelled")
PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)

# Longer than any solution: lengths are counted whole, and what --max_length cuts is worked out from them.
_NO_LIMIT = MOST_TOKENS
# Trajectories per call of the tokenizer: few calls, flat memory.
_BATCH = 256
# Labelled steps that wait to be joined with the distinct ones, all at once, as sorting them costs the most.
_KEYS = 1 << 20
_FOUND = np.dtype([("key", "V16"), ("total", "f8"), ("number", "i8"), ("least", "f4"), ("most", "f4")])


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


class DistinctCounts:
    """Labelled steps, and how many of them are distinct: the same question, the same steps before it, the same text.

    A distinct step has the mean of its labels; it is negative if that is at most 0.5, and conflicting if they differ.
    Memory grows with the number of distinct steps, 40 bytes each.
    """

    def __init__(self) -> None:
        self._labelled = 0
        self._negative = 0
        self._keys: list[bytes] = []
        self._labels: list[float] = []
        self._found = np.empty(0, _FOUND)

    def add(self, trajectory: Trajectory, steps: int | None = None) -> None:
        """Count one trajectory, or only its first `steps` steps."""
        key = hashlib.blake2b(trajectory.question.encode(), digest_size=16).digest()
        for text, label in zip(trajectory.steps[:steps], trajectory.labels.tolist(), strict=False):
            key = hashlib.blake2b(key + text.encode(), digest_size=16).digest()
            if label == label:  # not NaN
                self._keys.append(key)
                self._labels.append(label)
        if len(self._keys) >= _KEYS:
            self._merge()

    def as_dict(self) -> dict[str, int]:
        """For the JSON report, with everything added so far."""
        self._merge()
        found = self._found
        return {
            "labelled_steps": self._labelled,
            "negative_steps": self._negative,
            "distinct_labelled_steps": len(found),
            "distinct_negative_steps": int((found["total"] <= 0.5 * found["number"]).sum()),
            "conflicting_steps": int((found["least"] < found["most"]).sum()),
        }

    def _merge(self) -> None:
        """Join what waits with what was found."""
        labels = np.array(self._labels, np.float64)
        new = np.empty(len(labels), _FOUND)
        new["key"] = np.frombuffer(b"".join(self._keys), "V16")
        new["total"] = new["least"] = new["most"] = labels
        new["number"] = 1
        self._labelled += len(labels)
        self._negative += int((labels <= 0.5).sum())
        self._keys, self._labels = [], []
        both = np.concatenate([self._found, new])
        if not len(both):
            return
        words = np.ascontiguousarray(both["key"]).view("<u8").reshape(-1, 2)
        both = both[np.lexsort((words[:, 1], words[:, 0]))]
        begins = np.flatnonzero(np.append(True, both["key"][1:] != both["key"][:-1]))
        joined = both[begins].copy()
        joined["total"] = np.add.reduceat(both["total"], begins)
        joined["number"] = np.add.reduceat(both["number"], begins)
        joined["least"] = np.minimum.reduceat(both["least"], begins)
        joined["most"] = np.maximum.reduceat(both["most"], begins)
        self._found = joined


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
        if last is None or not trajectory.follows(last[-1]) or len(last) >= LARGEST_RECORD:
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


def distinct_line(counts: Mapping[str, Any]) -> str:
    """The result of DistinctCounts in one line."""

    def share(negative: str, of: str) -> str:
        return f"{counts[of]:,}, {counts[negative] / max(counts[of], 1):.1%} negative"

    return (
        f"labelled steps: {share('negative_steps', 'labelled_steps')}; "
        f"distinct: {share('distinct_negative_steps', 'distinct_labelled_steps')}, "
        f"{counts['conflicting_steps']:,} with labels that differ"
    )


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
