"""python -m cfprm_jax.sample: candidates from a policy for a file of questions."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.engines.batch import RequestsWritten
from cfprm_jax.engines.sample_options import SampleConfig
from cfprm_jax.engines.sampling import merge_candidates, sample_candidates
from cfprm_jax.runtime.progress import counted, duration


def main(config: SampleConfig) -> int:
    """The command. See :class:`SampleConfig`."""
    if config.merge:
        merged = merge_candidates(config)
        if merged is not None:
            print(f"merged      {counted(merged[0], 'row')} of {counted(merged[1], 'part')}")
        print(f"candidates  {config.output}{' is already complete' if merged is None else ''}")
        return 0
    try:
        summary = sample_candidates(config, functools.partial(print, flush=True))
    except RequestsWritten as written:
        print(written)
        return 0
    counts, seconds = summary.counts, summary.seconds
    if counts is None:
        print(f"candidates  {summary.output} is already complete")
        return 0
    print(
        f"done        {counted(summary.questions, 'question')}, {counted(counts.completions, 'candidate')}, "
        f"{counted(counts.tokens, 'token')} in "
        f"{duration(seconds)} ({counts.tokens / seconds:,.1f} tokens/s)\n"
        f"truncated   {summary.truncated:,} at {config.max_new_tokens:,} tokens; {summary.empty:,} empty\n"
        f"candidates  {summary.output}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(SampleConfig, main))
