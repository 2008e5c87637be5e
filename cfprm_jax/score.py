"""python -m cfprm_jax.score: step scores for candidates or trajectories, row by row."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from cfprm_jax import flags
from cfprm_jax.config import PACKINGS, DeviceConfig, option
from cfprm_jax.data.formats.files import InputFile, expand, rows
from cfprm_jax.errors import UserError
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.rows import Counts, SourcedRow, score_rows
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.progress import ProgressLine
from cfprm_jax.training import caches, devices, sharding
from cfprm_jax.training.metrics import duration


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Score every step of candidates or of stepwise trajectories.

    python -m cfprm_jax.score --checkpoint=RUN --input=CANDIDATES.jsonl --output=SCORED.jsonl

    Writes the same rows in the same order with "step_scores" (sigmoid of the logits) and "step_logits" in every
    candidate, and the resolved flags beside them. What has no steps or is too long has null in their place.
    """

    model: str = option("", "Hugging Face directory of a PRM. Either this or --checkpoint.")
    checkpoint: str = option("", "Run directory of train (its newest checkpoint), or one of its checkpoints/STEP.")
    input: tuple[str, ...] = option(
        (), "Candidates or stepwise rows: .jsonl files or globs, plain or .gz.", kind="list"
    )
    output: str = option("", "File to write; compressed if its name ends in .gz. One that exists is refused.")
    dtype: str = option(
        "auto",
        "Type of activations and matrix products; auto is what a run was trained in, or a directory's weights are.",
        choices=("auto", "bfloat16", "float32"),
    )
    attention: str = option("auto", "Attention kernel.", choices=("auto", "xla"))
    packing: str = option(
        "tree", "tree computes common prefixes once, sequence packs without sharing, none pads.", choices=PACKINGS
    )
    batch_rows: int = option(8, "Most rows that are computed at once, over all devices.", lower=1)
    row_length: int = option(0, "Tokens a row; 0 takes the maximum length rounded up to a multiple of 128.", lower=0)
    max_length: int = option(
        0,
        "Longest solution in tokens; a longer one gets null scores. 0 is the length that the model was trained for.",
        lower=0,
    )
    compile_cache_dir: str = option(
        "auto", "Where compiled steps are kept for the next start: auto is the user's cache, empty is nowhere."
    )
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)


def main(config: ScoreConfig) -> int:
    """The command."""
    if bool(config.model) == bool(config.checkpoint):
        raise UserError("name one of --model (a Hugging Face directory) and --checkpoint (a run of train)")
    if not config.input or not config.output:
        raise UserError(f"--{'output' if config.input else 'input'} is empty")
    output = pathlib.Path(config.output)
    if output.exists():
        raise UserError(f"--output={output} exists already: name another file, or remove it")
    files = expand(config.input)
    chosen = devices.select(config.device.platform)
    devices.keep_freed_memory(chosen)
    caches.use_compile_cache(config.compile_cache_dir)
    mesh = sharding.make_mesh(config.device, chosen)
    print(f"devices     {devices.describe(chosen)}", flush=True)
    loaded = open_prm(config.model or config.checkpoint, config.dtype, config.attention, mesh)
    if config.max_length:
        loaded = dataclasses.replace(
            loaded, encoding=dataclasses.replace(loaded.encoding, max_length=config.max_length)
        )
    loaded.config.backbone.refuse_length(loaded.encoding.max_length)
    scorer = Scorer(loaded, config.packing, config.batch_rows, config.row_length, mesh)
    print(
        f"model       {config.model or config.checkpoint}, {loaded.config.dtype}, up to {loaded.encoding.max_length} "
        f"tokens a solution\nrows        at most {scorer.shapes.all()[-1][0]} of {scorer.shapes.longest} tokens, "
        f"packing {config.packing}",
        flush=True,
    )
    counts, started = Counts(), time.monotonic()
    progress = _Progress(counts)
    with _written(output) as file:
        for row, _ in score_rows(_read(files, progress), scorer, counts):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            progress.scoring()
    progress.clear()
    pathlib.Path(f"{output}.config.json").write_text(json.dumps(flags.as_dict(config), indent=2) + "\n")
    seconds = time.monotonic() - started
    print(
        f"done        {counts.rows:,} rows, {counts.solutions:,} solutions, {counts.steps:,} steps in "
        f"{duration(seconds)} ({counts.solutions / max(seconds, 1e-9):,.1f} solutions/s)\n"
        f"not scored  {counts.empty:,} without steps, {counts.too_long:,} over {loaded.encoding.max_length} tokens\n"
        f"scores      {output}"
    )
    return 0


def _read(files: Sequence[InputFile], progress: _Progress) -> Iterator[SourcedRow]:
    """Every row of the files. UserError for what is no JSON object."""
    total, before = max(sum(file.size for file in files), 1), 0
    for file in files:
        for row in rows(file):
            source = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{source}: {row.reason}")
            progress.fraction = (before + row.fraction * file.size) / total
            yield row.data, source
        before += file.size


@contextlib.contextmanager
def _written(output: pathlib.Path) -> Iterator[TextIO]:
    """A file that has its name only when all of it is there; what fails leaves nothing behind."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.partial")
    try:
        if output.suffix == ".gz":
            with gzip.open(partial, "wt", encoding="utf-8") as file:
                yield file
        else:
            with partial.open("w", encoding="utf-8") as file:
                yield file
        partial.rename(output)
    finally:
        partial.unlink(missing_ok=True)


class _Progress(ProgressLine):
    """How far, how fast, and how long still."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(sys.stdout)
        self.fraction = 0.0
        self._counts = counts

    def scoring(self) -> None:
        """Report, unless that was done a moment ago."""
        self.show(self._line)

    def _line(self) -> str:
        left = duration(self.elapsed * (1 / self.fraction - 1)) if self.fraction else "?"
        return (
            f"scoring     {self._counts.rows:,} rows ({self.fraction:.0%}), "
            f"{self._counts.solutions / self.elapsed:,.1f} solutions/s, left {left}"
        )


if __name__ == "__main__":
    sys.exit(flags.run(ScoreConfig, main))
