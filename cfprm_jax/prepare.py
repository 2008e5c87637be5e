"""python -m cfprm_jax.prepare: converts corpora of any format to stepwise JSON lines at given granularities.

    python -m cfprm_jax.prepare --input=phase1_train.jsonl --c_max=2 --output=train.jsonl.gz --tokenizer=qwen2.5

Makes one pass over the input per granularity, with one record in memory at a time. The output is written atomically.
For an output NAME.jsonl or NAME.jsonl.gz, `NAME.report.json` (or --report) contains counts, `NAME.flags` the resolved
flags for --flagfile, and `NAME.bad_rows.jsonl` the malformed rows that --max_bad_rows allows.

The rows of the output are merged: each is a solution at the granularity in its "granularity" field, and its
"completions" are windows. Reading such a row gives a trajectory with those windows as steps. Several granularities
follow each other in the order given; a reader takes all of them. Training merges by itself: a coarse-to-fine run takes
the corpus, or the output of this command at granularity 1.
"""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import collections
import contextlib
import dataclasses
import gzip
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from cfprm_jax import flags
from cfprm_jax.config import EncodingConfig, Granularity, GranularityConfig, ReadConfig
from cfprm_jax.data import formats
from cfprm_jax.data.corpus_report import DistinctCounts, LabelCounts, TokenCounts, distinct_line, unlimited
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.data.questions import normalise, read_questions
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.data.windows import samples
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine
from cfprm_jax.runtime.regular_files import check_output

_ONE_STEP = "one step only: no coarse sample"
_NO_WINDOW = "no whole window (--window_tail=drop)"


@dataclasses.dataclass(frozen=True)
class FilesConfig(Options):
    """Input and output files."""

    input: tuple[str, ...] = option((), "Corpora: files or glob patterns.", kind="list")
    output: str = option("", "Output file of stepwise JSON lines; compressed if its name ends in .gz.")
    report: str = option("", "JSON report; by default in the directory of the output.")
    exclude_questions: tuple[str, ...] = option(
        (), "Test sets (rows with problem or question) whose questions are excluded.", kind="list"
    )
    tokenizer: str = option("", "Tokenizer directory, for token statistics.")


@dataclasses.dataclass(frozen=True)
class PrepareConfig(Options):
    """Read labelled corpora, merge steps into windows, write stepwise JSON lines and a report.

    python -m cfprm_jax.prepare --input=CORPUS.jsonl --c_max=2 --output=NAME.jsonl.gz

    Writes the output, NAME.report.json with counts and NAME.flags with the resolved flags. --epochs_per_granularity and
    --schedule apply to training only.
    """

    MAIN_FLAGS: ClassVar = (
        *("input", "output", "data_format", "c_max", "granularities"),
        *("neutral", "exclude_questions", "tokenizer", "max_length", "max_bad_rows"),
    )

    files: FilesConfig = dataclasses.field(default_factory=FilesConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    windows: GranularityConfig = dataclasses.field(default_factory=GranularityConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)


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
        read = config.read
        options = (read.data_format, read.neutral, read.alternatives, read.max_bad_rows)
        for trajectory in formats.read(
            config.files.input, *options, report=self.reading, estimates=config.read.estimates
        ):
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
                stream.write(_row(sample))
        progress.end(_read_so_far(self.reading, progress))

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        tokens = self.tokens.as_dict() if self.tokens is not None else None
        return {**self.written.as_dict(), **self.distinct.as_dict(), "skipped": dict(self.skipped), "tokens": tokens}


def main(config: PrepareConfig) -> int:
    """Runs the command; see the module's docstring.

    Raises:
      UserError: invalid flags or input. The output is then not written.
    """
    started = time.monotonic()
    _check(config)
    files, output = config.files, pathlib.Path(config.files.output)
    questions = read_questions(files.exclude_questions) if files.exclude_questions else frozenset()
    _announce(config, len(questions))
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
    print(_summary(report))
    if config.read.max_bad_rows:
        formats.write_bad_rows(f"{base}.bad_rows.jsonl", passes[0].reading.bad_rows)
        print(f"malformed rows: {base}.bad_rows.jsonl")
    print(f"wrote {output} and {report_path} in {time.monotonic() - started:.1f} s")
    return 0


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
    taken = {file.path.resolve() for file in formats.expand(config.files.input)}
    if output.resolve() in taken:
        raise UserError(f"--output={output} is also an input")
    if config.files.report and pathlib.Path(config.files.report).resolve() in taken | {output.resolve()}:
        raise UserError(f"--report={config.files.report} is also an input or the output")
    for name in ("epochs_per_granularity", "schedule"):
        if getattr(config.windows, name) != getattr(GranularityConfig(), name):
            raise UserError(f"--{name} applies to train only: prepare writes each granularity once, in the order given")


def _encoder(config: PrepareConfig) -> Any:
    """The encoder of the token statistics, or None."""
    if not config.files.tokenizer:
        return None
    # Importing transformers takes seconds, and only token statistics need it.
    from cfprm_jax.data.encoding import Encoder, load_tokenizer

    return Encoder(load_tokenizer(config.files.tokenizer, config.encoding.marker), unlimited(config.encoding))


def _row(trajectory: Trajectory) -> bytes:
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


def _announce(config: PrepareConfig, test_questions: int) -> None:
    """Prints inputs, options and output before the first pass."""
    inputs = formats.expand(config.files.input)
    size = sum(file.size for file in inputs) / 1e6
    read, windows = config.read, config.windows
    alternatives = "with alternatives" if read.alternatives else "without alternatives"
    print(f"prepare: {', '.join(file.name for file in inputs)} ({size:.1f} MB) -> {config.files.output}")
    print(f"  format {read.data_format}, neutral ratings {read.neutral}, {alternatives}, ", end="")
    print(f"at most {read.max_bad_rows} malformed rows")
    if read.estimates.estimate != "labels":
        print(f"  estimate {read.estimates.estimate}, after the first error: {read.estimates.after_first_error}")
    print(f"  granularities {', '.join(map(str, windows.stages))}; ", end="")
    print(f"window tail {windows.window_tail}, stride {windows.window_stride}")
    print(f"  token statistics: {config.files.tokenizer or 'none (no --tokenizer)'}", flush=True)
    if config.files.exclude_questions:
        names = ", ".join(config.files.exclude_questions)
        print(f"  without the {test_questions:,} questions of {names}", flush=True)


def _summary(report: dict[str, Any]) -> str:
    """The report as lines of text."""
    lines = [
        f"read {report['rows']:,} rows: {report['trajectories']:,} trajectories, {report['steps']:,} steps; "
        f"{len(report['bad_rows']):,} malformed rows skipped",
        *(f"  left out by rule: {count:,} {reason}" for reason, count in report["left_out"].items()),
    ]
    excluded = report["excluded"]
    if excluded["test_questions"]:
        found = f"{excluded['questions']:,} questions, {excluded['trajectories']:,} trajectories"
        lines.append(f"  excluded as test questions: {found}")
    if not report["written"]:
        lines.append("  the output is empty")
    lines.append("".join(f"{name:>13}" for name in ("granularity", "trajectories", "steps", *report["labels"])))
    for name, entry in report["granularities"].items():
        counts = [entry["trajectories"], entry["steps"], *entry["labels"].values()]
        lines.append(f"{name:>13}" + "".join(f"{count:>13,}" for count in counts))
        lines.append(f"{'':>13}  {distinct_line(entry)}")
        lines += [f"{'':>13}  skipped: {count:,}, {reason}" for reason, count in entry["skipped"].items()]
        lines += [f"{'':>13}  {line}" for line in _token_lines(entry["tokens"])] if entry["tokens"] else []
    return "\n".join(lines)


def _token_lines(tokens: dict[str, Any]) -> list[str]:
    lengths = tokens["lengths"]
    return [
        f"tokens: median {lengths['50']:,}, 95 % {lengths['95']:,}, longest {lengths['100']:,}; "
        f"{tokens['truncated']:,} over {tokens['max_length']:,}, {tokens['windows_cut']:,} windows cut",
        *(f"training will skip {count:,}: {reason}" for reason, count in tokens["skipped"].items() if count),
        f"{tokens['expanded']:,} tokens, {tokens['distinct']:,} distinct as prefixes: "
        f"{tokens['redundant_prefix_share']:.1%} redundant",
    ]


if __name__ == "__main__":
    sys.exit(flags.run(PrepareConfig, main))
