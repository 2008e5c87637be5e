"""python -m cfprm_jax.label: step labels from rollouts of a policy, a search tree, or a judge."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import pathlib
import sys
from typing import Any

from cfprm_jax import flags
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.engines.batch import RequestsWritten
from cfprm_jax.errors import UserError
from cfprm_jax.labelling import run
from cfprm_jax.labelling.options import LabelConfig
from cfprm_jax.runtime import output_paths
from cfprm_jax.runtime.progress import counted
from cfprm_jax.runtime.regular_files import check_output


def main(config: LabelConfig) -> int:
    """The command. See :class:`LabelConfig`."""
    judging = config.what.method == "consensus"
    requests_only = judging and bool(config.consensus.write_judge_requests)
    required = () if config.merge else ("input",) if judging else ("input", "model")
    for name in (*required, *(() if requests_only else ("output",))):
        if not getattr(config, name):
            raise UserError(f"--{name} is empty")
    if judging and not (requests_only or config.consensus.judge):
        raise UserError("--method=consensus needs --judge, or --write_judge_requests to ask one")
    if not requests_only:
        check_output(config.output, "--output")
        output_paths.require_directory(f"--output={config.output}", pathlib.Path(config.output).parent)
    log = functools.partial(print, flush=True)
    if config.merge:
        if judging or config.shard:
            raise UserError("--merge samples nothing: leave out --shard and --method=consensus")
        _show(config, run.merge(config, log))
        return 0
    if judging:
        _show_consensus(config, run.consensus(config, log))
        return 0
    try:
        _show(config, run.label(config, log))
    except RequestsWritten as written:
        print(written)
    return 0


def _show(config: LabelConfig, summary: dict[str, Any]) -> None:
    violating = "trees" if config.what.method == "tree" else "solutions"
    this, cost = summary["this_run"], summary["cost_against_a_full_sweep"]
    lines = [
        f"done        {counted(summary['rows'], 'row')} of {counted(summary['questions'], 'question')} "
        f"({summary['omitted_questions']:,} omitted by their rate); {counted(len(summary['bad_rows']), 'bad row')}",
        f"rollouts    {summary['rollouts']:,} from {counted(summary['prefixes'], 'prefix')}, "
        f"{counted(summary['tokens'], 'token')}" + (f"; {cost:.1%} of a full sweep" if cost is not None else ""),
        f"cut         {summary['cut_rollouts']:,} at {config.max_new_tokens:,} tokens; "
        f"{summary['rollouts_without_verdict']:,} without a verdict; "
        f"{summary['prefixes_too_long']:,} prefixes too long",
        f"violations  {summary['violations']:,} {violating} with a success after a step without one",
    ]
    if summary.get("correct_with_zeros"):  # label.json of an earlier version has none
        lines.append(
            f"note        {summary['correct_with_zeros']:,} correct solutions have a step from which no rollout "
            "reaches the answer: --estimate of prepare and train decides their labels (docs/labels.md)"
        )
    if warning := SplitCounts(**summary.get("split", {})).warning(config.separator):
        lines.append(warning)
    if this["share_computed"] is not None:
        lines.append(
            f"prefill     {counted(this['prompt_tokens_computed'], 'token')} of prompts, "
            f"{this['share_computed']:.1%} of one prefill a rollout, and "
            f"{counted(this['padding_tokens_computed'], 'token')} of padding"
        )
    print("\n".join([*lines, f"rows        {config.output}"]))


def _show_consensus(config: LabelConfig, summary: dict[str, Any]) -> None:
    if summary["bad_rows"]:
        print(f"bad rows    {len(summary['bad_rows']):,} skipped")
    if "requests" in summary:
        print(f"requests    {summary['requests']:,} in {config.consensus.write_judge_requests}")
        return
    share = "" if summary["share_kept"] is None else f" ({summary['share_kept']:.1%})"
    print(f"kept        {summary['kept']:,} of {summary['judged']:,} judged rows{share}")
    print(f"no verdict  {sum(summary['without_verdict'].values()):,}")
    print("confusion   first error by counts, by judge (-1: none), rows")
    for entry in summary["confusion"]:
        print(f"            {entry['counts']:>4} {entry['judge']:>4} {entry['rows']:>8,}")
    print(f"rows        {config.output}")


if __name__ == "__main__":
    sys.exit(flags.run(LabelConfig, main))
