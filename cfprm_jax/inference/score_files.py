"""Scores files of candidates or trajectories, row by row, and merges the parts of shares."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cfprm_jax.data.formats.files import InputFile, expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts, trunk
from cfprm_jax.inference.load import encoding_of, limited, open_configured, require_one_prm
from cfprm_jax.inference.options import ScoreConfig
from cfprm_jax.inference.row_file import open_rows
from cfprm_jax.inference.rows import ScoringCounts, SourcedRow, question_of, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.runtime import config_files, devices, digests, output_paths, shards
from cfprm_jax.runtime.progress import ProgressLine
from cfprm_jax.sharding import session

# Texts after which a separator that does not split most of them is reported before the end.
_EARLY_TEXTS = 256


@dataclasses.dataclass(frozen=True)
class ScoreSummary:
    """Result of scoring files.

    Attributes:
      output: the file, or the part of a share.
      counts: of the rows that this call scored; None if the output was complete.
      seconds: time of scoring, without loading.
      max_length: maximum length of a solution in tokens.
      separator: step separator of the PRM.
    """

    output: pathlib.Path
    counts: ScoringCounts | None
    seconds: float = 0.0
    max_length: int = 0
    separator: str = ""


def score_files(config: ScoreConfig, log: Callable[[str], None]) -> ScoreSummary:
    """Scores the rows of config.input into config.output, or into the part of config.shard.

    Args:
      log: receives lines about devices, model and rows.

    Raises:
      UserError: invalid options or input. Rows scored before remain in OUTPUT.partial and can be resumed.
    """
    require_one_prm(config.model, config.checkpoint)
    if not config.input or not config.output:
        raise UserError(f"--{'output' if config.input else 'input'} is empty")
    files = expand(config.input, "input")
    shard_text = shards.resolve(config.shard, os.environ)
    config = dataclasses.replace(config, model=local_directory(config.model), shard=shard_text)
    shard = shards.parse(config.shard)
    target = pathlib.Path(config.output) if shard is None else shard.path(config.output)
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    model = config.model or config.checkpoint
    fingerprint = {
        "model": parts.model_fingerprint(model),
        "input": digests.of_paths([file.path for file in files]),
    }
    encoding = encoding_of(model, config.encoding, config.step_separator)
    config = dataclasses.replace(config, encoding=encoding.name)
    described = parts.without_unused_sharing(config_files.as_dict(config))
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(target, config.resume, described, fingerprint) as output,
    ):
        if output.complete:
            return ScoreSummary(target, None)
        log(f"devices     {devices.describe(chosen)}")
        opened = open_configured(model, config, mesh, log=lambda line: log(f"checkpoint  {line}"))
        step = opened.meta.get("step")
        if step is not None:
            output.require("step", step)
        loaded = limited(opened, config.max_length)
        cached = trunk.for_scoring(config.cache_frozen, loaded, model, mesh)
        scorer = Scorer(loaded, config.packing, config.batch_rows, config.row_length, mesh=mesh, trunk=cached)
        before = f"; {output.done:,} rows already scored" if output.done else ""
        log(
            f"model       {model}{'' if step is None else f', step {step:,}'}, "
            f"{loaded.config.dtype}, up to "
            f"{loaded.encoding.max_length} tokens a solution\n"
            f"encoding    {encoding.name} ({encoding.reason})\n"
            f"rows        at most {scorer.shapes.all()[-1][0]} of up to {scorer.shapes.longest} tokens, "
            f"packing {config.packing}{before}"
        )
        counts, started = ScoringCounts(), time.monotonic()
        progress, warned = _Scoring(counts), False
        for row, _ in score_rows(_read(files, progress, output.done, shard), scorer, counts, output.done, shard):
            output.write(row)
            if not warned and 2 * counts.split.unsplit > counts.split.texts >= _EARLY_TEXTS:
                progress.line.clear()
                log(f"{counts.split.warning(loaded.encoding.separator)}")
                warned = True
            progress.show()
        progress.line.clear()
    seconds, encoding_config = time.monotonic() - started, loaded.encoding
    return ScoreSummary(target, counts, seconds, encoding_config.max_length, encoding_config.separator)


def merge_scores(config: ScoreConfig) -> tuple[int, int] | None:
    """Merges the parts of --shard: the bytes that --shard=0/1 writes.

    Returns:
      The numbers of rows and of parts; None if the output was complete.

    Raises:
      UserError: parts that are missing, or of other options, models or inputs. Nothing is then written.
    """
    if not config.output:
        raise UserError("--output is empty")
    if config.model or config.checkpoint or config.shard:
        raise UserError("--merge scores nothing: leave out --model, --checkpoint and --shard")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    found = parts.read_parts(config.merge)
    parts.require_same_flags(found, config)
    files = expand(config.input or found.config["input"])
    parts.require_input(found, [str(file.path) for file in files])
    own = {**found.config, "output": config.output, "shard": "0/1"}
    fingerprint = own.pop("fingerprint")
    with open_rows(config.output, config.resume, own, fingerprint) as output:
        if output.complete:
            return None
        # One pass that compares all rows with the input, and one that writes: an error leaves nothing behind.
        count = sum(1 for _ in _merged(found, files))
        for number, row in enumerate(_merged(found, files)):
            if number >= output.done:
                output.write(row)
    return count, len(found.files)


def _merged(found: parts.Parts, files: Sequence[InputFile]) -> Iterator[dict[str, Any]]:
    """The rows of all parts in the order of the input; progress is measured in the input."""
    counts = ScoringCounts()
    progress = _Scoring(counts)
    given = ((question_of(row), source, row) for row, source in _read(files, progress, 0))
    for row in parts.merged(found, given, parts.check_scored):
        counts.rows += 1
        yield row
        progress.show()
    progress.line.clear()


def _read(
    files: Sequence[InputFile], progress: _Scoring, done: int, shard: shards.Shard | None = None
) -> Iterator[SourcedRow]:
    """Every row of the files. UserError for a line that is not a JSON object.

    Args:
      done: rows of the shard that are written.
    """
    total, before, number = max(sum(file.size for file in files), 1), 0, 0
    for file in files:
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            own = shard is None or shard.owns(question_of(row.data))
            number += own
            if own and number > done:
                progress.fractions.append((before + row.fraction * file.size) / total)
            yield row.data, source
        before += file.size


class _Scoring:
    """Progress of scoring.

    Attributes:
      fractions: for every row that was read and is not scored yet, the fraction of the input up to its end.
    """

    def __init__(self, counts: ScoringCounts) -> None:
        self.line, self.fractions = ProgressLine("scoring"), collections.deque[float]()
        self._counts = counts

    def show(self) -> None:
        """Updates the line after a scored row; those that were scored with it are shown together."""
        fraction = self.fractions.popleft()
        if not self._counts.ready:
            self.line.show(lambda: self._text(fraction), fraction)

    def _text(self, fraction: float) -> str:
        rate = self._counts.solutions / self.line.elapsed
        return f"{self._counts.rows:,} rows ({fraction:.0%}), {rate:,.1f} solutions/s"
