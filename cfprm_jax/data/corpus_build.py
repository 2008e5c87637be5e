"""Reading, windowing and tokenising a corpus once, record after record, with counts of everything on the way.

Memory does not grow with the corpus: some hundred trajectories wait to be tokenised together, the rest is on disk.
"""

from __future__ import annotations

import collections
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cfprm_jax.config import EncodingConfig, Granularity, GranularityConfig, ReadConfig
from cfprm_jax.data import questions
from cfprm_jax.data.corpus_files import GranularityWriter
from cfprm_jax.data.corpus_report import LABEL_CLASSES, PERCENTILES, DistinctCounts
from cfprm_jax.data.encoding import Encoded, Encoder
from cfprm_jax.data.formats import ReadReport, read_as
from cfprm_jax.data.formats.files import Paths
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.data.trajectory import LARGEST_RECORD, Trajectory
from cfprm_jax.data.windows import samples
from cfprm_jax.runtime import digests

# Trajectories tokenised in one call: enough to keep the tokenizer's threads busy.
_BATCH = 512


def is_held_out(question: str, fraction: float) -> bool:
    """Whether a question belongs to the held-out share.

    It is selected by a hash of the question's normal form (:mod:`cfprm_jax.data.questions`), so that a question is on
    one side in all its spellings.
    """
    return int.from_bytes(digests.raw(questions.normalise(question))[:8], "big") / 2**64 < fraction


class _Counts:
    """Counters of the samples at one granularity."""

    def __init__(self, max_length: int) -> None:
        self.labels = dict.fromkeys(LABEL_CLASSES, 0)
        self.skipped: collections.Counter[str] = collections.Counter()
        self.redundant = 0
        self.useful = 0
        self.truncated = 0
        self.windows_cut = 0
        self.distinct = 0
        self.distinct_steps = DistinctCounts()
        self._lengths = np.zeros(max_length + 1, np.int64)

    def keeps(self, encoded: Encoded) -> bool:
        """Whether a sample is of use for training; the reason is counted if it is not."""
        if len(encoded.tokens) == 0:
            self.skipped["prompt longer than max_length"] += 1
        elif len(encoded.step_positions) == 0:
            self.skipped["no window within max_length"] += 1
        elif np.isnan(encoded.labels).all():
            self.skipped["no label left after truncation" if encoded.steps_cut else "no labelled step"] += 1
        else:
            return True
        return False

    def add(self, kept: list[tuple[Trajectory, Encoded]]) -> None:
        """Count the samples of one record that are kept."""
        for sample, encoded in kept:
            self.distinct_steps.add(sample, len(encoded.step_positions))
            labels = encoded.labels
            positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
            unlabelled = int(np.isnan(labels).sum())
            if encoded.redundancy is not None:
                known = encoded.redundancy[~np.isnan(encoded.redundancy)]
                self.redundant += int((known > 0.5).sum())
                self.useful += int((known <= 0.5).sum())
            self.labels["positive"] += positive
            self.labels["negative"] += negative
            self.labels["unlabelled"] += unlabelled
            self.labels["soft"] += len(labels) - positive - negative - unlabelled
            self.truncated += encoded.steps_cut > 0
            self.windows_cut += encoded.steps_cut
            self._lengths[len(encoded.tokens)] += 1
        self.distinct += shared_forest([encoded.tokens for _, encoded in kept]).size

    def as_dict(self, writer: GranularityWriter) -> dict[str, Any]:
        lengths = np.arange(len(self._lengths))
        expanded = int((lengths * self._lengths).sum())
        return {
            "trajectories": writer.trajectories,
            "records": writer.records,
            "steps": sum(self.labels.values()),
            "labels": self.labels,
            "redundant_steps": self.redundant,
            "useful_steps": self.useful,
            **self.distinct_steps.as_dict(),
            "truncated": self.truncated,
            "windows_cut": self.windows_cut,
            "skipped": dict(self.skipped),
            "tokens_expanded": expanded,
            "tokens_distinct": self.distinct,
            "redundant_prefix_share": round(1 - self.distinct / expanded, 6) if expanded else 0.0,
            "lengths": self._percentiles(),
        }

    def _percentiles(self) -> dict[str, int]:
        """Percentiles of the lengths: the smallest length that at least p percent of the samples do not exceed."""
        upto = np.cumsum(self._lengths)
        ranks = [max(-(-rank * int(upto[-1]) // 100), 1) for rank in PERCENTILES]
        return {
            str(rank): int(np.searchsorted(upto, least)) if upto[-1] else 0
            for rank, least in zip(PERCENTILES, ranks, strict=True)
        }


def build(
    directory: pathlib.Path,
    paths: Paths,
    read: ReadConfig,
    *,
    granularities: GranularityConfig,
    encoding: EncodingConfig,
    encoder: Encoder,
    side: str,
    held_out_fraction: float,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Any]:
    """Write the files of every granularity into directory.

    Returns:
      {"report": the counts of :func:`~cfprm_jax.data.corpus.open_corpus`, "granularities": counts of the files}.
    """
    reading = ReadReport()
    stages = sorted(granularities.stages, key=str)
    writers: dict[Granularity, GranularityWriter] = {}
    counts = {granularity: _Counts(encoding.max_length) for granularity in stages}
    other = 0

    # The solutions of a question follow one another.
    held_out = functools.lru_cache(maxsize=16)(functools.partial(is_held_out, fraction=held_out_fraction))

    def on_this_side(trajectory: Trajectory) -> bool:
        return side == "all" or held_out(trajectory.question) == (side == "held_out")

    def flush(records: list[list[Trajectory]]) -> None:
        for granularity in stages:
            cut = [[_samples(t, granularity, granularities, encoding) for t in record] for record in records]
            every = [sample for record in cut for given in record for sample in given]
            items = [(sample.question, sample.steps, sample.labels) for sample in every]
            encoded = iter(encoder.encode_many(items, [sample.redundancy for sample in every]))
            for record, given in zip(records, cut, strict=True):
                counts[granularity].skipped["no window at this granularity"] += sum(not some for some in given)
                both = [(sample, next(encoded)) for some in given for sample in some]
                kept = [(sample, one) for sample, one in both if counts[granularity].keeps(one)]
                if kept:
                    writers[granularity].add(record[0].source, record[0].question, [one for _, one in kept])
                    counts[granularity].add(kept)

    try:
        for granularity in stages:
            writers[granularity] = GranularityWriter(directory / str(granularity))
        waiting: list[list[Trajectory]] = []
        for record in group_records(read_as(paths, read, reading), LARGEST_RECORD):
            used = [trajectory for trajectory in record if on_this_side(trajectory)]
            other += len(record) - len(used)
            if used:
                waiting.append(used)
            if sum(map(len, waiting)) >= _BATCH:
                flush(waiting)
                waiting = []
                if progress is not None:
                    progress(reading.fraction)
        flush(waiting)
    finally:
        for writer in writers.values():
            writer.close()
    report: dict[str, Any] = {
        "files": dict(reading.files),
        "rows": reading.rows,
        "bad_rows": [str(row) for row in reading.bad_rows],
        "left_out": dict(reading.left_out),
        "trajectories": reading.trajectories,
        "questions": side,
        "trajectories_of_other_questions": other,
        "granularities": {str(g): counts[g].as_dict(writers[g]) for g in stages},
    }
    for entry in report["granularities"].values():
        entry["skipped"] = {reason: count for reason, count in entry["skipped"].items() if count}
    return {"report": report, "granularities": {str(g): writers[g].counts() for g in stages}}


def group_records(trajectories: Iterator[Trajectory], largest: float = math.inf) -> Iterator[list[Trajectory]]:
    """Consecutive trajectories of one source and question, at most `largest` at a time."""
    record: list[Trajectory] = []
    for trajectory in trajectories:
        if record and (not trajectory.follows(record[-1]) or len(record) >= largest):
            yield record
            record = []
        record.append(trajectory)
    if record:
        yield record


def _samples(
    trajectory: Trajectory, granularity: Granularity, config: GranularityConfig, encoding: EncodingConfig
) -> list[Trajectory]:
    return samples(trajectory, granularity, config.window_tail, config.window_stride, encoding.separator)
