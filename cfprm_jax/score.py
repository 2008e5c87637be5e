"""python -m cfprm_jax.score: step scores for candidates or trajectories, row by row."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

from cfprm_jax import flags
from cfprm_jax.checkpoints.model_files import MODEL
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.checkpoints.saving import locate
from cfprm_jax.config import (
    ATTENTION_HELP,
    ATTENTIONS,
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
from cfprm_jax.inference.load import encoding_of, limited, open_prm
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES, open_rows
from cfprm_jax.inference.rows import ScoringCounts, SourcedRow, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files, devices, digests, output_paths
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
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: ScoreConfig) -> int:
    """The command."""
    if bool(config.model) == bool(config.checkpoint):
        raise UserError("expected either --model (a Hugging Face directory) or --checkpoint (a run of train)")
    if not config.input or not config.output:
        raise UserError(f"--{'output' if config.input else 'input'} is empty")
    config = dataclasses.replace(config, model=local_directory(config.model))
    files = expand(config.input)
    output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    fingerprint = {
        "model": _model_fingerprint(config),
        "input": digests.of_paths([file.path for file in files], whole=True),
    }
    model = config.model or config.checkpoint
    encoding = encoding_of(model, config.encoding, config.step_separator)
    config = dataclasses.replace(config, encoding=encoding.name)
    with (
        session.opened(config.device) as (chosen, mesh),
        open_rows(config.output, config.resume, config_files.as_dict(config), fingerprint) as output,
    ):
        if output.complete:
            print(f"scores      {config.output} is already complete")
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
        scorer = Scorer(loaded, config.packing, config.batch_rows, config.row_length, mesh)
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
        for row, _ in score_rows(_read(files, progress, output.done), scorer, counts, output.done):
            output.write(row)
            progress.show()
        progress.line.clear()
    seconds = time.monotonic() - started
    print(
        f"done        {counts.rows:,} rows, {counts.solutions:,} solutions, {counts.steps:,} steps in "
        f"{duration(seconds)} ({counts.solutions / max(seconds, 1e-9):,.1f} solutions/s)\n"
        f"not scored  {counts.empty:,} without steps, {counts.too_long:,} over {loaded.encoding.max_length} tokens\n"
        f"scores      {config.output}"
    )
    return 0


def _log_checkpoint(line: str) -> None:
    print(f"checkpoint  {line}", flush=True)


def _model_fingerprint(config: ScoreConfig) -> str:
    """Digest that identifies the PRM; of a run, that of the loaded checkpoint."""
    path = pathlib.Path(config.model or config.checkpoint)
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; expected a run of train, a checkpoint or a Hugging Face directory")
    if path.name != CHECKPOINTS and path.parent.name != CHECKPOINTS and not (path / CHECKPOINTS).is_dir():
        return digests.of_paths([path], whole=False)
    run, step = locate(path)
    return digests.of_paths([run / MODEL, run / CHECKPOINTS / str(step)], whole=False)


def _read(files: Sequence[InputFile], progress: _Scoring, done: int) -> Iterator[SourcedRow]:
    """Every row of the files. UserError for a line that is not a JSON object."""
    total, before, number = max(sum(file.size for file in files), 1), 0, 0
    for file in files:
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            number += 1
            if number > done:
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
