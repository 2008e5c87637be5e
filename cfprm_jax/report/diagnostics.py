"""The diagnostics of step scores as a table and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfprm_jax.report.tables import Grid

NOTE = (
    "Of the solutions with two scored steps or more. A model that judges the outcome has its lowest score at the last "
    "step more often than errors are there, and passes wrong processes that end in a right answer. Correlations are "
    "Spearman's: over all steps, and the mean within solutions, which the difficulty of the questions has no part in."
)


def table(found: Mapping[str, Any]) -> Grid:
    """A line a diagnostic.

    Args:
      found: :class:`cfprm_jax.evaluation.diagnostics.Diagnostics` as a JSON object.
    """
    grid = [["diagnostic", "value", "of"]]
    grid.append(
        ["lowest score at the last step", percent(found["lowest_at_last"]), f"{found['solutions']:,} solutions"]
    )
    if found["wrong_process"]:
        grid.append(
            [
                "right answer by a wrong process, judged rightly",
                percent(found["wrong_process_accuracy"]),
                f"{found['wrong_process']:,} solutions",
            ]
        )
    for entry in found["correlations"]:
        name = f"rank correlation of score and {entry['quantity']}"
        if entry["all_steps"] is not None:
            grid.append([name, f"{entry['all_steps']:+.2f}", "all steps"])
        if entry["within_solutions"] is not None:
            grid.append([name, f"{entry['within_solutions']:+.2f}", f"within {entry['solutions']:,} solutions"])
    return grid


def percent(value: float | None) -> str:
    """A share in %, or a dash."""
    return "-" if value is None else f"{100 * value:.1f} %"
