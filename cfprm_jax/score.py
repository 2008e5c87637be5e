"""python -m cfprm_jax.score: step scores for candidates or trajectories, row by row."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.inference.options import ScoreConfig
from cfprm_jax.inference.score_files import merge_scores, score_files
from cfprm_jax.runtime.progress import counted, duration


def main(config: ScoreConfig) -> int:
    """The command. See :class:`ScoreConfig`."""
    if config.merge:
        merged = merge_scores(config)
        if merged is not None:
            print(f"merged      {counted(merged[0], 'row')} of {counted(merged[1], 'part')}")
        print(f"scores      {config.output}{' is already complete' if merged is None else ''}")
        return 0
    summary = score_files(config, functools.partial(print, flush=True))
    counts, seconds = summary.counts, summary.seconds
    if counts is None:
        print(f"scores      {summary.output} is already complete")
        return 0
    print(
        f"done        {counted(counts.rows, 'row')}, {counted(counts.solutions, 'solution')}, "
        f"{counted(counts.steps, 'step')} in {duration(seconds)} "
        f"({counts.solutions / max(seconds, 1e-9):,.1f} solutions/s)\n"
        f"not scored  {counts.empty:,} without steps, {counts.too_long:,} over {summary.max_length} tokens"
    )
    if warning := counts.split.warning(summary.separator):
        print(warning)
    print(f"scores      {summary.output}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(ScoreConfig, main))
