"""The results of process_bench as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cfprm_jax.report import diagnostics
from cfprm_jax.report.tables import markdown


def document(outcome: Mapping[str, Any]) -> str:
    """The results as Markdown, with threshold and counts.

    Args:
      outcome: the content of results.json.
    """

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    grid = [["subset", "erroneous", "correct", "accuracy on erroneous", "accuracy on correct", "F1"]]
    for name, found in outcome["subsets"].items():
        grid.append(
            [
                f"{name} (tuned on)" if name == outcome["tuned_on"] else name,
                f"{found['erroneous']:,}",
                f"{found['correct']:,}",
                percent(found["accuracy_erroneous"]),
                percent(found["accuracy_correct"]),
                percent(found["f1"]),
            ]
        )
    grid.append(["average", "", "", "", "", percent(outcome["average_f1"])])
    if outcome["tuned_on"]:
        grid.append([f"average without {outcome['tuned_on']}", *[""] * 4, percent(outcome["average_f1_without_tuned"])])
    how = f"tuned on {outcome['tuned_on']}" if outcome["tuned_on"] else "--threshold"
    unscored = sum(found["unscored"] for found in outcome["subsets"].values())
    return (
        f"{markdown(grid)}\nIn %. The predicted error is the first step whose score is below "
        f"{outcome['threshold']:.4g} ({how}). {unscored:,} solutions could not be scored and count as misses.\n\n"
        f"{markdown(diagnostics.table(outcome['diagnostics']))}\n{diagnostics.NOTE}\n"
    )
