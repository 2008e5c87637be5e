"""Accuracies as results.json and as a table to read."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.evaluation.best_of_n import METHODS, Pool, Row

_NAMES = {
    "best_of_n": "best of n",
    "weighted_vote": "weighted vote",
    "majority": "majority vote",
    "pass_at_1": "pass@1",
    "first": "first candidate",
    "oracle": "oracle",
}


def results(config: Mapping[str, Any], pool: Pool, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON object of results.json; "pool" is the number of candidates a question, or the least and the most."""
    smallest, largest = int(pool.sizes.min()), int(pool.sizes.max())
    return {
        "config": dict(config),
        "questions": len(pool.ids),
        "pool": smallest if smallest == largest else [smallest, largest],
        "unscored": pool.unscored,
        "rows": [
            {
                "n": row.n,
                "method": row.method,
                "aggregation": row.aggregation,
                "accuracy": row.accuracy,
                "ci95": list(row.ci95),
                "draws": row.draws,
                "draw_std": row.draw_std,
            }
            for row in rows
        ],
    }


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of percentages: a line a method and aggregation, a column an n, intervals in brackets.

    With draws their standard deviation follows a ±. The columns are padded, so that it reads well unrendered too.
    """
    sizes = list(dict.fromkeys(row.n for row in rows))
    lines = list(dict.fromkeys((row.method, row.aggregation) for row in rows))
    lines.sort(key=lambda line: METHODS.index(line[0]))
    cells = {(row.method, row.aggregation, row.n): _cell(row) for row in rows}
    grid = [["method", *(f"n = {size}" for size in sizes)]]
    for method, aggregation in lines:
        name = _NAMES[method] + (f", {aggregation}" if aggregation else "")
        grid.append([name, *(cells[method, aggregation, size] for size in sizes)])
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in grid
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text) + "\n"


def _cell(row: Row) -> str:
    spread = "" if row.draw_std is None else f" ± {100 * row.draw_std:.1f}"
    return f"{100 * row.accuracy:.1f}{spread} [{100 * row.ci95[0]:.1f}, {100 * row.ci95[1]:.1f}]"


def caption(outcome: Mapping[str, Any]) -> str:
    """One paragraph that says what the table's numbers are."""
    config, pool = outcome["config"], outcome["pool"]
    size = f"{pool}" if isinstance(pool, int) else f"{pool[0]} to {pool[1]}"
    chosen = f"mean ± standard deviation over {config['draws']} random subsets of n" if config["draws"] else "first n"
    unscored = f", {outcome['unscored']:,} of them without scores" if outcome["unscored"] else ""
    return (
        f"Accuracy in %, with a 95 % bootstrap interval over {outcome['questions']:,} questions. {size} candidates a "
        f"question{unscored}; {chosen}. Grader: {config['grader']}. Seed: {config['seed']}. pass@1 is the mean over "
        "all candidates, and the first candidate that of the file, whatever n is."
    )


def write(outcome: Mapping[str, Any], text: str, directory: str | pathlib.Path) -> None:
    """Write results.json and table.md into a directory that exists."""
    directory = pathlib.Path(directory)
    (directory / "results.json").write_text(json.dumps(outcome, indent=1) + "\n")
    (directory / "table.md").write_text(text)
