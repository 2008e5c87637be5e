"""Data of --grid=real: chosen records of a corpus, and what cells are evaluated on.

Records are written as stepwise rows beside the experiment, so that a cell is a run of train on a file.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.benchmarks.process_bench import read as read_process_bench
from cfprm_jax.config import ReadConfig
from cfprm_jax.data import corpus_build, formats
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.data.prefix_places import PrefixPlaces
from cfprm_jax.data.preparing import stepwise_line
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.first_error import NO_ERROR, predict
from cfprm_jax.experiments.cell import TestSet, read_test
from cfprm_jax.experiments.real import RealConfig
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Item, Scores
from cfprm_jax.runtime import atomic

# The default of process_bench, and of accuracy at a logit of 0.
_THRESHOLD = 0.5


class Record(NamedTuple):
    """The trajectories of one record, and the number of their distinct tokens."""

    trajectories: list[Trajectory]
    tokens: int


class Chosen(NamedTuple):
    """Records of a corpus.

    Attributes:
      records: those chosen, in their order.
      read: how many were read; reading stops once there are enough.
      too_large: how many of those have more tokens than allowed.
      unlabelled: how many have no labelled step, or a question too long for one.
      bad_rows: malformed rows that --max_bad_rows allowed: file, line and reason.
    """

    records: list[Record]
    read: int
    too_large: int
    unlabelled: int
    bad_rows: list[str]

    def describe(self) -> str:
        """For the log."""
        tokens = sum(record.tokens for record in self.records)
        left_out = f"{self.too_large:,} too large, {self.unlabelled:,} without labelled steps"
        found = f"{len(self.records):,} of the first {self.read:,} records ({left_out}), {tokens:,} distinct tokens"
        return found + "".join(f"\nskipped     {row}" for row in self.bad_rows)


class Flags(NamedTuple):
    """Names of the flags of a corpus."""

    paths: str
    number: str
    most: str


TRAIN = Flags("train_data", "train_records", "record_tokens")
HELD_OUT = Flags("heldout_data", "heldout_records", "heldout_record_tokens")


def choose(paths: Sequence[str], read: ReadConfig, encoder: Encoder, number: int, most: int, *, flags: Flags) -> Chosen:
    """The first records of corpora.

    Args:
      number: how many; 0 is all.
      most: distinct tokens of a record; 0 is no limit.
      flags: those that name the corpora, number and most.

    Raises:
      UserError: there are fewer, or as of reading.
    """
    records: list[Record] = []
    seen = too_large = unlabelled = 0
    report = ReadReport()
    for trajectories in corpus_build.group_records(formats.read_as(paths, read, report)):
        seen += 1
        encoded = encoder.encode_many([(t.question, t.steps, t.labels) for t in trajectories])
        tokens = PrefixPlaces.of([one.tokens for one in encoded if len(one.step_positions)]).tokens
        if not any(np.isfinite(one.labels).any() for one in encoded if len(one.step_positions)):
            unlabelled += 1
        elif most and tokens > most:
            too_large += 1
        else:
            records.append(Record(trajectories, tokens))
            if len(records) == number:
                break
    if not records or len(records) < number:
        found = f"--{flags.paths}={','.join(paths)}: {len(records):,} of {seen:,} records can be chosen"
        reasons = [f"{unlabelled:,} have no labelled step within --max_length"] * bool(unlabelled)
        if too_large:
            reasons.append(f"{too_large:,} have more distinct tokens than --{flags.most}={most}")
        if reasons:
            found += f" ({', '.join(reasons)})"
        expected = f"fewer than --{flags.number}={number}; 0 is all of them" if number else "expected at least one"
        raise UserError(f"{found}, {expected}")
    return Chosen(records, seen, too_large, unlabelled, [str(row) for row in report.bad_rows])


def drawn(records: Sequence[Record], most: int, seed: int) -> list[Record]:
    """Records of about this number of distinct tokens together, drawn with a seed, in their order; 0 is all."""
    if not most:
        return list(records)
    order = np.random.default_rng(seed).permutation(len(records))
    total = np.cumsum([records[place].tokens for place in order])
    return [records[place] for place in sorted(order[: max(int(np.searchsorted(total, most, side="right")), 1)])]


def write_records(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Stepwise rows; a file with this content is left alone."""
    content = b"".join(stepwise_line(one) for record in records for one in record.trajectories)
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, content)


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out records.

    Attributes:
      items: question and steps of every trajectory.
      item_record: the record of each.
      first_error: index of the first step labelled wrong of each, or NO_ERROR.
      item, step: of each distinct labelled step, a trajectory and its index there.
      record: of each distinct labelled step.
      label: of each distinct labelled step, the mean over its occurrences.
    """

    items: list[Item]
    item_record: Int[np.ndarray, " items"]
    first_error: Int[np.ndarray, " items"]
    item: Int[np.ndarray, " steps"]
    step: Int[np.ndarray, " steps"]
    record: Int[np.ndarray, " steps"]
    label: Float[np.ndarray, " steps"]

    @classmethod
    def of(cls, records: Sequence[Record]) -> HeldOut:
        """The held-out data of these records."""
        items: list[Item] = []
        of_items: list[tuple[int, int]] = []
        labels: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        places: dict[tuple[str, tuple[str, ...]], tuple[int, int, int]] = {}
        for number, record in enumerate(records):
            for one in record.trajectories:
                wrong = np.flatnonzero(one.labels <= _THRESHOLD)
                of_items.append((number, int(wrong[0]) if len(wrong) else NO_ERROR))
                for step in np.flatnonzero(np.isfinite(one.labels)).tolist():
                    key = (one.question, one.steps[: step + 1])
                    labels.setdefault(key, []).append(float(one.labels[step]))
                    places.setdefault(key, (len(items), step, number))
                items.append((one.question, one.steps))
        at = np.array([places[key] for key in labels], np.int64).reshape(-1, 3)
        item_record, first_error = np.array(of_items, np.int64).T
        means = np.array([np.mean(values) for values in labels.values()])
        return cls(items, item_record, first_error, at[:, 0], at[:, 1], at[:, 2], means)

    @property
    def right(self) -> Bool[np.ndarray, " steps"]:
        """Whether each distinct step is right."""
        return self.label > _THRESHOLD

    @functools.cached_property
    def siblings(self) -> Int[np.ndarray, "pairs 2"]:
        """All pairs of a distinct right step and a wrong one after the same steps of a question.

        Their position is the same, so that it cannot tell them apart.
        """
        after: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for number, (item, step) in enumerate(zip(self.item, self.step, strict=True)):
            question, steps = self.items[item]
            after.setdefault((question, tuple(steps[:step])), []).append(number)
        right = self.right
        pairs = [(a, b) for same in after.values() for a in same if right[a] for b in same if not right[b]]
        return np.array(pairs, np.int64).reshape(-1, 2)

    def logits(self, scores: Scores) -> Float[np.ndarray, " steps"]:
        """z of every distinct step; NaN where the trajectory could not be scored."""
        found = [scores[item] for item in self.item]
        return np.array([np.nan if z is None else z[step] for z, step in zip(found, self.step, strict=True)])

    def located(self, scores: Scores) -> Float[np.ndarray, " records"]:
        """Of every record, the share of its solutions whose first error is found exactly, or none where there is none.

        The predicted error is the first step whose score is below 0.5; a solution without scores is a miss.
        """
        right = located(scores, self.first_error)
        counts = np.bincount(self.item_record)
        return np.bincount(self.item_record, right) / counts


@dataclasses.dataclass(frozen=True, eq=False)
class ErrorSet:
    """A subset of ProcessBench: solutions, and the index of the first error of each."""

    name: str
    items: list[Item]
    label: Int[np.ndarray, " solutions"]


def located(scores: Scores, label: Int[np.ndarray, " solutions"]) -> Float[np.ndarray, " solutions"]:
    """1 where the first score below 0.5 is that of the labelled step, or there is none and no error; else 0."""
    found = [predict(None if z is None else sigmoid(z), _THRESHOLD) for z in scores]
    return np.array([float(one == truth) for one, truth in zip(found, label.tolist(), strict=True)])


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluationSets:
    """What every cell is evaluated on; what was not given is None or empty."""

    held_out: HeldOut | None
    pool: TestSet | None
    process_bench: list[ErrorSet]

    @property
    def items(self) -> dict[str, list[Item]]:
        """The solutions that are scored, by the name of their set."""
        found = {} if self.held_out is None else {"held_out": self.held_out.items}
        if self.pool is not None:
            found["pool"] = self.pool.items
        return found | {f"process_bench/{one.name}": one.items for one in self.process_bench}


def read_sets(
    config: RealConfig, read: ReadConfig, encoder: Encoder, most: int, log: Callable[[str], None]
) -> EvaluationSets:
    """Read what is given by flags, and log what is not.

    Args:
      most: candidates of a question of the pool.

    Raises:
      UserError: a file is missing or malformed, or has less than the flags ask for.
    """
    held_out = pool = None
    if config.heldout_data:
        chosen = choose(
            config.heldout_data,
            read,
            encoder,
            config.heldout_records,
            config.heldout_record_tokens,
            flags=HELD_OUT,
        )
        held_out = HeldOut.of(chosen.records)
        log(
            f"held out    {chosen.describe()}\n"
            f"held out    {len(held_out.items):,} trajectories, {len(held_out.label):,} distinct "
            f"steps, {int((~held_out.right).sum()):,} of them wrong, {len(held_out.siblings):,} pairs of siblings"
        )
    else:
        log("held out    --heldout_data is not given: left out")
    if config.pool:
        pool = _thinned(read_test("pool", config.pool, encoder, most), most, config.pool_questions)
        if warning := pool.split.warning(encoder.config.separator):
            log(warning)
        log(f"pool        {len(pool.correct):,} questions, {most} candidates each, pass@1 {pool.correct.mean():.1%}")
    else:
        log("pool        --pool is not given: left out")
    subsets: dict[str, list[tuple[Item, int]]] = {}
    for row in read_process_bench(config.process_bench) if config.process_bench else ():
        subsets.setdefault(row["subset"], []).append(((row["problem"], row["steps"]), row["label"]))
    bench = []
    for name, rows in subsets.items():
        places = _even(
            len(rows),
            config.process_bench_solutions,
            "--process_bench_solutions",
            f"the subset {name!r} of --process_bench={','.join(config.process_bench)} has {len(rows):,} solutions",
        )
        kept = [rows[place] for place in places]
        bench.append(ErrorSet(name, [item for item, _ in kept], np.array([label for _, label in kept])))
        log(f"ProcessBench {name}: {len(kept):,} solutions, {int((bench[-1].label >= 0).sum()):,} with an error")
    if not bench:
        log("ProcessBench --process_bench is not given: left out")
    if held_out is None and pool is None and not bench:
        raise UserError("--grid=real: expected --heldout_data, --pool or --process_bench to evaluate on")
    return EvaluationSets(held_out, pool, bench)


def _thinned(pool: TestSet, most: int, questions: int) -> TestSet:
    """Some questions of a pool."""
    found = f"--pool={pool.path} has {len(pool.correct):,} questions"
    places = _even(len(pool.correct), questions, "--pool_questions", found)
    items = [item for place in places for item in pool.items[place * most : (place + 1) * most]]
    return dataclasses.replace(pool, items=items, correct=pool.correct[places], group=pool.group[places], steps=None)


def _even(length: int, number: int, flag: str, found: str) -> list[int]:
    """Places at even distances; 0 is all.

    Args:
      flag: that gives the number.
      found: where they are and how many, for the error.
    """
    if number > length:
        raise UserError(f"{flag}={number}: {found}; 0 is all of them")
    return list(range(length)) if not number else [int(k * length / number) for k in range(number)]
