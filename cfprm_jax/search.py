"""python -m cfprm_jax.search: solutions by search with a policy and a PRM."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import sys

from cfprm_jax import flags
from cfprm_jax.runtime.progress import counted, duration
from cfprm_jax.searching.options import SearchConfig
from cfprm_jax.searching.search_files import search_files


def main(config: SearchConfig) -> int:
    """The command. See :class:`SearchConfig`."""
    summary = search_files(config, functools.partial(print, flush=True))
    if summary is None:
        print(f"candidates  {config.output} is already complete")
        return 0
    cost = summary.cost
    print(
        f"done        {counted(summary.questions, 'question')} in {duration(summary.seconds)}; "
        f"{summary.fewer:,} with fewer solutions than n\n"
        f"cost        {counted(cost.policy_tokens, 'token')} of the policy, {cost.reward_tokens:,} of the PRM "
        f"({cost.reward_requested:,} without kept prefixes), {counted(cost.calls, 'call')}; "
        f"{cost.discarded_tokens:,} of {cost.sampled_tokens:,} sampled tokens discarded"
    )
    if warning := summary.split.warning(summary.separator):
        print(warning)
    print(f"candidates  {config.output}")
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(SearchConfig, main))
