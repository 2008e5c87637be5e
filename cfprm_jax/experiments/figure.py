"""The paper's figure: accuracy over the largest C, a panel for each loss and test set.

The outcome model has panels where it is the only row.
"""

from __future__ import annotations

import pathlib

from cfprm_jax.errors import UserError
from cfprm_jax.experiments.contrasts import Results, row_title
from cfprm_jax.experiments.grid import ORM, SWEEP
from cfprm_jax.experiments.intervals import estimates
from cfprm_jax.runtime import atomic


def write(results: Results, path: pathlib.Path) -> None:
    """Write the figure as PNG: means over seeds, questions and n with 95 % intervals, single seeds as dots.

    Raises:
      UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("matplotlib is missing, which the figure is drawn with: pip install matplotlib") from error
    level = results.levels[0]
    rows = [row for row in results.rows if row != ORM] or list(results.rows)
    figure = Figure(figsize=(2.9 * len(rows), 2.6 * len(results.tests)), layout="constrained")
    axes = figure.subplots(len(results.tests), len(rows), squeeze=False, sharex=True)
    for line, test in enumerate(results.tests):
        for column, row in enumerate(rows):
            panel = axes[line, column]
            there = [t for t in SWEEP if results.has(level, row, t)]
            tables = [results.mean(level, row, t, test) for t in there]
            found, x = estimates(tables), [SWEEP[t] for t in there]
            for place, table in zip(x, tables, strict=True):
                panel.plot([place] * len(table), 100 * table.mean(axis=1), ".", color="0.7", markersize=4, zorder=1)
            errors = [[100 * (e.mean - e.low) for e in found], [100 * (e.high - e.mean) for e in found]]
            panel.errorbar(x, [100 * e.mean for e in found], errors, marker="o", markersize=4, capsize=3, zorder=2)
            if results.has(level, row, "plain_matched"):
                (matched,) = estimates([results.mean(level, row, "plain_matched", test)])
                panel.axhline(100 * matched.mean, linestyle=":", color="C1", label="plain, as many steps")
            panel.set_title(f"{row_title(row)}, {test}", fontsize=9)
            panel.set_xticks(sorted(SWEEP.values()))
            panel.tick_params(labelsize=8)
            if line == len(results.tests) - 1:
                panel.set_xlabel("C (1: plain)", fontsize=8)
            if column == 0:
                panel.set_ylabel("Best-of-N accuracy, %", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        axes[0, 0].legend(handles, labels, fontsize=7, frameon=False)
    # Neither date nor version in the file: the same results give the same bytes.
    with atomic.writing(path) as file:
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
