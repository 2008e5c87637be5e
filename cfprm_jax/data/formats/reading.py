"""Corpus files of any format to a stream of trajectories, with the policy for malformed rows.

The format decides which rows are a record (:mod:`cfprm_jax.data.formats.grouping`). One row at a time is in memory, or
those of one record where a format joins several rows into one solution.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from cfprm_jax.config import DATA_FORMATS, EstimateConfig, ReadConfig
from cfprm_jax.data.formats import files
from cfprm_jax.data.formats.fields import ParseOptions, Solution
from cfprm_jax.data.formats.files import InputFile, Paths, Row
from cfprm_jax.data.formats.grouping import Grouping
from cfprm_jax.data.formats.registry import FORMATS
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A malformed row that was skipped: where it is, what is wrong with it, how it begins if it is not JSON."""

    file: str
    line: int
    reason: str
    excerpt: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclasses.dataclass
class ReadReport:
    """Counters of a reading; they grow while the trajectories are consumed.

    Attributes:
      files: format of each file, by its name in messages.
      rows: rows seen, malformed ones included.
      trajectories: trajectories given.
      bad_rows: malformed rows skipped, one entry each.
      left_out: what rules of a format left out, reason to count.
      fraction: share of the input, in bytes, that has been read.
    """

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: int = 0
    trajectories: int = 0
    bad_rows: list[BadRow] = dataclasses.field(default_factory=list)
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    fraction: float = 0.0


def read(
    path: Paths,
    data_format: str = "auto",
    *,
    neutral: str = "positive",
    alternatives: bool = True,
    max_bad_rows: int = 0,
    bad_rows: list[BadRow] | None = None,
    report: ReadReport | None = None,
    estimates: EstimateConfig | None = None,
) -> Iterator[Trajectory]:
    """The trajectories of one or more corpus files, in the order of the files and rows.

    Args:
      path: a file, a glob pattern, or a sequence of these: JSON lines or a JSON array, plain or .gz, or parquet.
      data_format: a format's name, or "auto" to detect each file's by its rows.
      neutral: what a rating of 0 counts as: "positive", "negative", or "drop" (unlabelled; PRM800K alternatives that
        are neutral are left out).
      alternatives: PRM800K: completions that were not chosen end trajectories of their own.
      max_bad_rows: malformed rows, over all files, that are skipped before the reading stops.
      bad_rows: a list to which every skipped row is appended.
      report: counts to fill while reading.
      estimates: how counts of rollouts become labels; by default a row's own labels are taken.

    Returns:
      An iterator. Memory does not grow with the files. Consecutive trajectories of one record have equal `source`,
      which is "file:line" of the record's first row, or a stepwise row's own "source".

    Raises:
      UserError: no such file, an empty or damaged one, an unknown format, more malformed rows than allowed (the message
        names file, line and reason of the first beyond), or nothing readable in all the files.
    """
    if data_format not in DATA_FORMATS:
        raise UserError(f"data format {data_format!r} is not among: {', '.join(DATA_FORMATS)}")
    if neutral not in ("positive", "negative", "drop"):
        raise UserError(f"neutral {neutral!r} is not among: positive, negative, drop")
    report = ReadReport() if report is None else report
    options = (neutral, alternatives, estimates or EstimateConfig())
    reading = _Reading(report, *options, max_bad_rows, bad_rows)
    return _read(files.expand(path), data_format, reading)


def read_as(paths: Paths, config: ReadConfig, report: ReadReport) -> Iterator[Trajectory]:
    """:func:`read` with the options of a command, filling the report."""
    return read(
        paths,
        config.data_format,
        neutral=config.neutral,
        alternatives=config.alternatives,
        max_bad_rows=config.max_bad_rows,
        report=report,
        estimates=config.estimates,
    )


def write_bad_rows(path: str | os.PathLike[str], bad_rows: Iterable[BadRow]) -> None:
    """Write the side file that lists skipped rows: JSON lines of "file", "line", "reason" and "excerpt"."""
    atomic.write_bytes(path, b"".join(atomic.encode_json(dataclasses.asdict(bad)) for bad in bad_rows))


@dataclasses.dataclass
class _Reading:
    """The state of one call of `read`."""

    report: ReadReport
    neutral: str
    alternatives: bool
    estimates: EstimateConfig
    max_bad_rows: int
    listener: list[BadRow] | None

    def parse(self, row: Row, module: ModuleType) -> list[Solution]:
        """The solutions of a row; what rules left out of it counts only if the row is sound."""
        left_out: list[str] = []
        solutions = module.parse(
            row.data, ParseOptions(self.neutral, self.alternatives, self.estimates, left_out.append)
        )
        self.report.left_out.update(left_out)
        return solutions

    def skip(self, file: InputFile, row: Row, reason: str) -> None:
        """Skip a malformed row, or stop when there have been too many."""
        bad = BadRow(file.name, row.line, reason, row.excerpt)
        if len(self.report.bad_rows) >= self.max_bad_rows:
            allowed = f" (after {self.max_bad_rows} that --max_bad_rows allows)" if self.max_bad_rows else ""
            raise UserError(f"{bad}{allowed}")
        self.report.bad_rows.append(bad)
        if self.listener is not None:
            self.listener.append(bad)


def _read(inputs: list[InputFile], data_format: str, reading: _Reading) -> Iterator[Trajectory]:
    report = reading.report
    total, done = sum(file.size for file in inputs) or 1, 0
    for file in inputs:
        for trajectory, fraction in _file(file, data_format, reading):
            report.trajectories += 1
            report.fraction = (done + fraction * file.size) / total
            yield trajectory
        done += file.size
    report.fraction = 1.0
    if not report.trajectories:
        seen = f"{report.rows} rows, {len(report.bad_rows)} of them malformed"
        raise UserError(f"{', '.join(file.name for file in inputs)}: not one trajectory ({seen})")


def _file(file: InputFile, data_format: str, reading: _Reading) -> Iterator[tuple[Trajectory, float]]:
    """The trajectories of a file, each with the share of the file that has been read."""
    module = None if data_format == "auto" else _by_name(data_format)
    record: Grouping | None = None
    source, fraction = "", 0.0
    for row in files.rows(file):
        reading.report.rows += 1
        try:
            if row.data is None:
                raise UserError(row.reason)
            module = module or _by_content(row.data)
            reading.report.files[file.name] = module.NAME
            solutions = reading.parse(row, module)
            continues = record is not None and record.continues(solutions)
            own = source if continues else f"{file.name}:{row.line}"
            # All of a row is checked before any of it is given away.
            trajectories = [_trajectory(solution, own) for solution in solutions]
        except UserError as error:
            reading.skip(file, row, str(error))
            continue
        if record is None or not continues:
            yield from _finished(record, source, fraction)
            record = getattr(module, "GROUPING", Grouping)()
        whole = record.add(solutions)
        if whole is not solutions:
            trajectories = [_trajectory(solution, own) for solution in whole]
        yield from ((trajectory, row.fraction) for trajectory in trajectories)
        source, fraction = own, row.fraction
    yield from _finished(record, source, fraction)


def _finished(record: Grouping | None, source: str, fraction: float) -> Iterator[tuple[Trajectory, float]]:
    """The trajectories that a record releases at its end."""
    for solution in record.finish() if record is not None else ():
        yield _trajectory(solution, source), fraction


def _trajectory(solution: Solution, source: str) -> Trajectory:
    steps, labels = tuple(solution.steps), np.array(solution.labels, np.float64)
    record = solution.source or source
    given = solution.redundancy
    redundancy = np.full(len(steps), np.nan) if given is None else np.array(given, np.float64)
    return Trajectory(
        solution.question,
        steps,
        labels,
        record,
        solution.id,
        solution.answer,
        solution.granularity,
        redundancy,
        windows=None if solution.windows is None else tuple(solution.windows),
    )


def _by_name(name: str) -> ModuleType:
    return next(module for module in FORMATS if name == module.NAME)


def _by_content(row: dict[str, Any]) -> ModuleType:
    """The format of a row.

    Raises:
      UserError: no format matches; the message names what was found and what was expected.
    """
    for module in FORMATS:
        if module.matches(row):
            return module
    found = ", ".join(row) or "none"
    close = [module for module in FORMATS if 0 < len(set(module.FIELDS) - set(row)) < len(module.FIELDS)]
    for module in close:
        missing = ", ".join(name for name in module.FIELDS if name not in row)
        if 2 * len(set(module.FIELDS) & set(row)) > len(module.FIELDS):
            raise UserError(f"missing field {missing} of the {module.NAME} format; found: {found}")
    known = "; ".join(f"{module.NAME} ({', '.join(module.FIELDS)})" for module in FORMATS)
    raise UserError(f"unknown format: found the fields {found}; known: {known}")
