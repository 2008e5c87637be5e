"""python -m cfprm_jax.score: step scores for candidates or trajectories, row by row."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import collections
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from cfprm_jax import flags
from cfprm_jax.config import (
    ATTENTION_HELP,
    ATTENTIONS,
    CACHE_FROZEN_HELP,
    CHECKPOINT_HELP,
    DTYPE_HELP,
    ENCODING_HELP,
    ENCODINGS,
    MOST_TOKENS,
    PACKINGS,
    DeviceConfig,
)
from cfprm_jax.data.formats.files import InputFile, expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.hub import local_directory
from cfprm_jax.inference import parts, trunk
from cfprm_jax.inference.load import encoding_of, limited, open_prm
from cfprm_jax.inference.parts import without_unused_sharing
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES, open_rows
from cfprm_jax.inference.rows import ScoringCounts, SourcedRow, question_of, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files, devices, digests, output_paths, shards
from cfprm_jax.runtime.progress import ProgressLine, duration
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class ScoreConfig(Options):
    """Score every step of candidates or of stepwise trajectories.

    python -m cfprm_jax.score --checkpoint=RUN --input=CANDIDATES.jsonl --output=SCORED.jsonl

    Writes the rows of the input in their order, with "step_scores" (sigmoids) and "step_logits" (raw head outputs)
    added to every candidate, and the resolved flags in OUTPUT.config.json. Both are null for a candidate without steps
    or longer than --max_length.
    """

    MAIN_FLAGS: ClassVar = (
        *("checkpoint", "model", "input", "output", "resume"),
        *("encoding", "step_separator", "max_length", "batch_rows", "platform"),
    )

    model: str = option("", "Hugging Face directory of a PRM. Exclusive with --checkpoint.")
    checkpoint: str = option("", CHECKPOINT_HELP)
    input: tuple[str, ...] = option(
        (), "Candidates or stepwise rows: .jsonl files or globs, plain or .gz.", kind="list"
    )
    output: str = option("", "Output file; compressed if its name ends in .gz.")
    resume: str = option("never", RESUME_HELP, choices=RESUMES)
    shard: str = option(
        "",
        "INDEX/COUNT scores the share INDEX, from 0, of the questions, into OUTPUT.INDEX-of-COUNT; auto takes both "
        "from jax.distributed or the launcher (docs/running.md).",
    )
    merge: tuple[str, ...] = option(
        (), "Parts that --shard wrote, or globs: write them as one file and score nothing.", kind="list"
    )
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option(
        "",
        "Step separator, with escapes: splits texts that are not divided into steps; for --encoding=trl it also "
        "follows each step. Empty is the default of the encoding. A directory with prm.json defines its own.",
    )
    dtype: str = option("auto", DTYPE_HELP, choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    packing: str = option(
        "tree",
        "Packing of solutions into rows: tree computes common prefixes once, sequence does not, none pads one per row.",
        choices=PACKINGS,
    )
    batch_rows: int = option(8, "Maximum number of rows per batch, over all devices.", lower=1, upper=1 << 14)
    row_length: int = option(
        0,
        "Row length in tokens. 0 selects it by the width of the network and the lengths of the solutions.",
        lower=8,
        upper=4 * MOST_TOKENS,
        also=0,
    )
    max_length: int = option(
        0,
        "Maximum length of a solution in tokens; longer ones have null scores. 0 is the maximum of training.",
        lower=8,
        upper=MOST_TOKENS,
        also=0,
    )
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: ScoreConfig) -> int:
    """The command."""
    if config.merge:
        return merge(config)
    if bool(config.model) == bool(config.checkpoint):
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")
    if not config.input or not config.output:
        raise UserError(f"--{'output' if config.input else 'input'} is empty")
    config = dataclasses.replace(config, model=local_directory(config.model))
    config = dataclasses.replace(config, shard=shards.resolve(config.shard, os.environ))
    shard = shards.parse(config.shard)
    target = pathlib.Path(config.output) if shard is None else shard.path(config.output)
    files = expand(config.input)
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    fingerprint = {
        "model": parts.model_fingerprint(config.model or config.checkpoint),
        "input": digests.of_paths([file.path for file in files], whole=True),
    }
    model = config.model or config.checkpoint
    encoding = encoding_of(model, config.encoding, config.step_separator)
    config = dataclasses.replace(config, encoding=encoding.name)
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(target, config.resume, without_unused_sharing(config_files.as_dict(config)), fingerprint) as output,
    ):
        if output.complete:
            print(f"scores      {target} is already complete")
            return 0
        print(f"devices     {devices.describe(chosen)}", flush=True)
        opened = open_prm(
            model,
            config.dtype,
            config.attention,
            mesh,
            encoding.name,
            config.step_separator,
            log=_log_checkpoint,
        )
        step = opened.meta.get("step")
        if step is not None:
            output.require("step", step)
        loaded = limited(opened, config.max_length)
        cached = trunk.for_scoring(config.cache_frozen, loaded, model, mesh)
        scorer = Scorer(loaded, config.packing, config.batch_rows, config.row_length, mesh, cached)
        before = f"; {output.done:,} rows already scored" if output.done else ""
        print(
            f"model       {model}{'' if step is None else f', step {step:,}'}, "
            f"{loaded.config.dtype}, up to "
            f"{loaded.encoding.max_length} tokens a solution\n"
            f"encoding    {encoding.name} ({encoding.reason})\n"
            f"rows        at most {scorer.shapes.all()[-1][0]} of up to {scorer.shapes.longest} tokens, "
            f"packing {config.packing}{before}",
            flush=True,
        )
        counts, started = ScoringCounts(), time.monotonic()
        progress = _Scoring(counts)
        for row, _ in score_rows(_read(files, progress, output.done, shard), scorer, counts, output.done, shard):
            output.write(row)
            progress.show()
        progress.line.clear()
    seconds = time.monotonic() - started
    print(
        f"done        {counts.rows:,} rows, {counts.solutions:,} solutions, {counts.steps:,} steps in "
        f"{duration(seconds)} ({counts.solutions / max(seconds, 1e-9):,.1f} solutions/s)\n"
        f"not scored  {counts.empty:,} without steps, {counts.too_long:,} over {loaded.encoding.max_length} tokens\n"
        f"scores      {target}"
    )
    return 0


def merge(config: ScoreConfig) -> int:
    """Put the parts of --shard together: the bytes that --shard=0/1 writes."""
    if not config.output:
        raise UserError("--output is empty")
    if config.model or config.checkpoint or config.shard:
        raise UserError("--merge scores nothing: leave out --model, --checkpoint and --shard")
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    found = parts.read_parts(config.merge)
    files = expand(config.input or found.config["input"])
    parts.require_input(found, [str(file.path) for file in files])
    own = {**found.config, "output": config.output, "shard": "0/1"}
    fingerprint = own.pop("fingerprint")
    with open_rows(config.output, config.resume, own, fingerprint) as output:
        if output.complete:
            print(f"scores      {config.output} is already complete")
            return 0
        # Once to compare all rows with the input, and once to write: what is refused leaves nothing behind.
        count = sum(1 for _ in _merged(found, files))
        for number, row in enumerate(_merged(found, files)):
            if number >= output.done:
                output.write(row)
    print(f"merged      {count:,} rows of {len(found.files)} parts\nscores      {config.output}")
    return 0


def _merged(found: parts.Parts, files: Sequence[InputFile]) -> Iterator[dict[str, Any]]:
    """The rows of all parts in the order of the input; the progress line goes by the input."""
    counts = ScoringCounts()
    progress = _Scoring(counts)
    given = ((question_of(row), source, row) for row, source in _read(files, progress, 0))
    for row in parts.merged(found, given, parts.check_scored):
        counts.rows += 1
        yield row
        progress.show()
    progress.line.clear()


def _log_checkpoint(line: str) -> None:
    print(f"checkpoint  {line}", flush=True)


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
        """Updates the line after a scored row."""
        fraction = self.fractions.popleft()
        self.line.show(lambda: self._text(fraction), fraction)

    def _text(self, fraction: float) -> str:
        rate = self._counts.solutions / self.line.elapsed
        return f"{self._counts.rows:,} rows ({fraction:.0%}), {rate:,.1f} solutions/s"


if __name__ == "__main__":
    sys.exit(flags.run(ScoreConfig, main))
