"""All options of `score`."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cfprm_jax.config import (
    CACHE_FROZEN_HELP,
    MOST_TOKENS,
    PACKINGS,
    ScoringConfig,
    checked_cache_frozen,
)
from cfprm_jax.inference.row_file import RESUME_HELP, RESUMES
from cfprm_jax.options import option


@dataclasses.dataclass(frozen=True)
class ScoreConfig(ScoringConfig):
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
    step_separator: str = option(
        "",
        "Step separator, with escapes: splits texts that are not divided into steps; for --encoding=trl it also "
        "follows each step. Empty is the default of the encoding. A run, or a directory with prm.json, defines its "
        'own: for other steps give them as a list, "steps" of a candidate (docs/candidates.md).',
    )
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
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cache_frozen", checked_cache_frozen(self.cache_frozen))
