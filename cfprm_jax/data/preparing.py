"""Conversion of corpora to stepwise JSON lines at given granularities.

Makes one pass over the input per granularity, with one record in memory at a time. The output is written atomically.
For an output NAME.jsonl or NAME.jsonl.gz, `NAME.report.json` (or --report) contains counts, `NAME.flags` the resolved
flags for --flagfile, and `NAME.bad_rows.jsonl` the malformed rows that --max_bad_rows allows.

The rows of the output are merged: each is a solution at the granularity in its "granularity" field, and its
"completions" are windows. Reading such a row gives a trajectory with those windows as steps. Several granularities
follow each other in the order given; a reader takes all of them. Training merges by itself: a coarse-to-fine run takes
the corpus, or the output at granularity 1.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import numpy as np

from cfprm_jax.config import Granularity, GranularityConfig
from cfprm_jax.data import formats
from cfprm_jax.data.corpus_report import DistinctCounts, LabelCounts, TokenCounts, unlimited
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.data.formats.files import require
from cfprm_jax.data.preparing_options import PrepareConfig
from cfprm_jax.data.questions import normalise, read_questions
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.data.windows import samples
from cfprm_jax.errors import UserError
from cfprm_jax.options import refuse_unused
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine
from cfprm_jax.runtime.regular_files import check_output

_ONE_STEP = "one step only: no coarse sample"
_NO_WINDOW = "no whole window (--window_tail=drop)"


def prepare(config: PrepareConfig, log: Callable[[str], None]) -> Prepared:
    """Writes the corpus at each granularity, the report and the flags.

    Args:
      log: receives lines about inputs and options.

    Raises:
      UserError: invalid options or input. The output is then not written.
    """
    _check(config)
    files, output = config.files, pathlib.Path(config.files.output)
    questions = read_questions(files.exclude_questions) if files.exclude_questions else frozenset()
    log(_announcement(config, len(questions)))
    encoder = _encoder(config)
    passes = [
        _Pass(granularity, _Exclusion(questions), TokenCounts(encoder, config.encoding.max_length) if encoder else None)
        for granularity in config.windows.stages
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    with _written(output) as stream:
        for one in passes:
            one.run(config, stream)
    base = output.with_name(output.name.removesuffix(".gz").removesuffix(".jsonl"))
    report, report_path = _report(config, passes), pathlib.Path(files.report or f"{base}.report.json")
    report_path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(report_path, report)
    atomic.write_text(f"{base}.flags", config_files.flag_file(config))
    bad_rows = pathlib.Path(f"{base}.bad_rows.jsonl") if config.read.max_bad_rows else None
    if bad_rows is not None:
        formats.write_bad_rows(bad_rows, passes[0].reading.bad_rows)
    return Prepared(report, output, report_path, bad_rows)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What :func:`prepare` wrote.

    Attributes:
      report: the content of the JSON report.
      bad_rows: the file of malformed rows, with --max_bad_rows.
    """

    report: dict[str, Any]
    output: pathlib.Path
    report_path: pathlib.Path
    bad_rows: pathlib.Path | None


@dataclasses.dataclass
class _Exclusion:
    """Excluded test questions, and counts of their occurrences."""

    questions: frozenset[str]
    found: set[str] = dataclasses.field(default_factory=set)
    trajectories: int = 0
    _last: tuple[str, str] = ("", "")

    def takes(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory's question is a test question; counts it if so."""
        if not self.questions:
            return False
        if trajectory.question != self._last[0]:
            self._last = (trajectory.question, normalise(trajectory.question))
        if self._last[1] not in self.questions:
            return False
        self.found.add(self._last[1])
        self.trajectories += 1
        return True


@dataclasses.dataclass
class _Pass:
    """One pass over the input at one granularity, with its counts."""

    granularity: Granularity
    exclusion: _Exclusion
    tokens: TokenCounts | None
    reading: ReadReport = dataclasses.field(default_factory=ReadReport)
    read: LabelCounts = dataclasses.field(default_factory=LabelCounts)
    written: LabelCounts = dataclasses.field(default_factory=LabelCounts)
    distinct: DistinctCounts = dataclasses.field(default_factory=DistinctCounts)
    skipped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def run(self, config: PrepareConfig, stream: BinaryIO) -> None:
        """Writes the whole input at this granularity."""
        windows, separator = config.windows, config.encoding.separator
        progress = ProgressLine(f"C={self.granularity}")
        for trajectory in formats.read_as(config.files.input, config.read, self.reading):
            self.read.add(trajectory)
            progress.show(lambda: _read_so_far(self.reading, progress), self.reading.fraction)
            if self.exclusion.takes(trajectory):
                continue
            merged = samples(trajectory, self.granularity, windows.window_tail, windows.window_stride, separator)
            if not merged:
                self.skipped[_ONE_STEP if len(trajectory.steps) == 1 else _NO_WINDOW] += 1
            for sample in merged:
                self.written.add(sample)
                self.distinct.add(sample)
                if self.tokens is not None:
                    self.tokens.add(sample)
                stream.write(stepwise_line(sample))
        progress.end(_read_so_far(self.reading, progress))

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        tokens = self.tokens.as_dict() if self.tokens is not None else None
        return {**self.written.as_dict(), **self.distinct.as_dict(), "skipped": dict(self.skipped), "tokens": tokens}


def _report(config: PrepareConfig, passes: list[_Pass]) -> dict[str, Any]:
    """The JSON report. All passes read the same input; counts of the input are those of the first."""
    first = passes[0]
    return {
        "config": config_files.as_dict(config),
        "files": first.reading.files,
        "rows": first.reading.rows,
        **first.read.as_dict(),
        "bad_rows": [dataclasses.asdict(bad) for bad in first.reading.bad_rows],
        "left_out": dict(first.reading.left_out),
        "excluded": {
            "test_questions": len(first.exclusion.questions),
            "questions": len(first.exclusion.found),
            "trajectories": first.exclusion.trajectories,
        },
        "granularities": {str(one.granularity): one.as_dict() for one in passes},
        "written": sum(one.written.trajectories for one in passes),
    }


def _check(config: PrepareConfig) -> None:
    """Validates flags that depend on each other, before any input is read."""
    if not config.files.input:
        raise UserError("--input is empty: expected corpora to read")
    if not config.files.output:
        raise UserError("--output is empty: expected a file to write")
    output = pathlib.Path(config.files.output)
    check_output(output, "--output")
    if config.files.report:
        check_output(config.files.report, "--report")
    output_paths.require_directory(f"--output={output}", output.parent)
    if output.suffix == ".parquet":
        raise UserError(f"--output={output}: expected the name of a JSON lines file, NAME.jsonl or NAME.jsonl.gz")
    taken = {file.path.resolve() for file in formats.expand(config.files.input, "input")}
    require(exclude_questions=config.files.exclude_questions)
    if config.files.exclude_questions:
        taken |= {file.path.resolve() for file in formats.expand(config.files.exclude_questions, "exclude_questions")}
    if output.resolve() in taken:
        raise UserError(f"--output={output} is also an input")
    if config.files.report and pathlib.Path(config.files.report).resolve() in taken | {output.resolve()}:
        raise UserError(f"--report={config.files.report} is also an input or the output")
    for name in ("epochs_per_granularity", "schedule"):
        if getattr(config.windows, name) != getattr(GranularityConfig(), name):
            raise UserError(f"--{name} applies to train only: prepare writes each granularity once, in the order given")
    config.windows.refuse_unused()
    if not config.files.tokenizer:
        refuse_unused(config.encoding, ["max_length", "marker", "system_prompt"], "token statistics, with --tokenizer")


def _encoder(config: PrepareConfig) -> Any:
    """The encoder of the token statistics, or None."""
    if not config.files.tokenizer:
        return None
    # Importing transformers takes seconds, and only token statistics need it.
    from cfprm_jax.data.encoding import Encoder, load_tokenizer

    return Encoder(load_tokenizer(config.files.tokenizer, config.encoding.marker), unlimited(config.encoding))


def stepwise_line(trajectory: Trajectory) -> bytes:
    """One line of the stepwise format."""
    row: dict[str, Any] = {
        "prompt": trajectory.question,
        "completions": trajectory.steps,
        "labels": [_number(label) for label in trajectory.labels],
        "granularity": trajectory.granularity,
        "source": trajectory.source,
    }
    if not np.isnan(trajectory.redundancy).all():
        row["redundancy"] = [_number(value) for value in trajectory.redundancy]
    optional = {"id": trajectory.id, "answer": trajectory.answer, "windows": trajectory.windows}
    row.update({name: value for name, value in optional.items() if value is not None})
    return atomic.encode_json(row)


def _number(label: np.float32) -> float | None:
    """The shortest decimal of this float32: 0.7 is written as 0.7, and reading it restores the same bits."""
    if np.isnan(label):
        return None
    return float(label) if label in (0, 1) else float(str(label))


@contextlib.contextmanager
def _written(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A stream that replaces path atomically when the block ends without an exception."""
    try:
        with atomic.writing(path) as raw, contextlib.ExitStack() as stack:
            stream = cast(BinaryIO, raw)
            if path.suffix == ".gz":
                # Without name and time, the same input gives the same bytes.
                packed = gzip.GzipFile(filename="", mode="wb", compresslevel=5, fileobj=raw, mtime=0)
                stream = cast(BinaryIO, stack.enter_context(packed))
            yield stream
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _read_so_far(reading: ReadReport, progress: ProgressLine) -> str:
    rate = reading.trajectories / progress.elapsed
    return f"{reading.fraction:4.0%}, {reading.trajectories:,} trajectories, {rate:,.0f} trajectories/s"


def _announcement(config: PrepareConfig, test_questions: int) -> str:
    """Inputs, options and output, for the log."""
    inputs = formats.expand(config.files.input)
    size = sum(file.size for file in inputs) / 1e6
    read, windows = config.read, config.windows
    alternatives = "with alternatives" if read.alternatives else "without alternatives"
    lines = [
        f"prepare: {', '.join(file.name for file in inputs)} ({size:.1f} MB) -> {config.files.output}",
        f"  format {read.data_format}, neutral ratings {read.neutral}, {alternatives}, "
        f"at most {read.max_bad_rows} malformed rows",
    ]
    if read.estimates.estimate != "labels":
        lines.append(f"  estimate {read.estimates.estimate}, after the first error: {read.estimates.after_first_error}")
    lines += [
        f"  granularities {', '.join(map(str, windows.stages))}; window tail {windows.window_tail}, "
        f"stride {windows.window_stride}",
        f"  token statistics: {config.files.tokenizer or 'none (no --tokenizer)'}",
    ]
    if config.files.exclude_questions:
        lines.append(f"  without the {test_questions:,} questions of {', '.join(config.files.exclude_questions)}")
    return "\n".join(lines)
