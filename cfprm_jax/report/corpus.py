"""The report of prepare as lines of text."""

from __future__ import annotations

from typing import Any

from cfprm_jax.data.corpus_report import distinct_line
from cfprm_jax.runtime.progress import counted


def summary(report: dict[str, Any]) -> str:
    """Counts of the input and of each granularity.

    Args:
      report: the content of the JSON report.
    """
    lines = [
        f"read {counted(report['rows'], 'row')}: {counted(report['trajectories'], 'trajectory')}, "
        f"{counted(report['steps'], 'step')}; {counted(len(report['bad_rows']), 'malformed row')} skipped",
        *(f"  left out by rule: {count:,} {reason}" for reason, count in report["left_out"].items()),
    ]
    excluded = report["excluded"]
    if excluded["test_questions"]:
        found = f"{counted(excluded['questions'], 'question')}, {counted(excluded['trajectories'], 'trajectory')}"
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
        f"{tokens['truncated']:,} over {tokens['max_length']:,}, {counted(tokens['windows_cut'], 'window')} cut",
        *(f"training will skip {count:,}: {reason}" for reason, count in tokens["skipped"].items() if count),
        f"{tokens['expanded']:,} tokens, {tokens['distinct']:,} distinct as prefixes: "
        f"{tokens['redundant_prefix_share']:.1%} redundant",
    ]
