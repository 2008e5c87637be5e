"""Table 2 of the paper: Best-of-N accuracy of each row, plain and coarse to fine, in Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from cfprm_jax.experiments.contrasts import ContrastFamily, Results, row_title
from cfprm_jax.experiments.intervals import Estimate


def _cells(results: Results, level: str, row: str, treatment: str, test: str) -> list[tuple[float, float]]:
    """Mean and standard deviation over seeds, in %, for every n and their average."""
    right = results.right(level, row, treatment, test).mean(axis=1)
    columns: Float[np.ndarray, "seeds columns"] = 100 * np.concatenate(
        [right, right.mean(axis=1, keepdims=True)], axis=1
    )
    deviation = columns.std(axis=0, ddof=1) if len(columns) > 1 else np.full(columns.shape[1], np.nan)
    return list(zip(columns.mean(axis=0).tolist(), deviation.tolist(), strict=True))


def _rows(results: Results) -> list[tuple[str, str, str]]:
    """(level, row, treatment) of every line of the table."""
    return [
        (level, row, treatment)
        for level in results.levels
        for row in results.rows
        for treatment in ("plain", "c2")
        if results.has(level, row, treatment)
    ]


def _gains(families: Sequence[ContrastFamily]) -> dict[tuple[str, str], Estimate]:
    """The difference of the paper at the first level, by row and test set."""
    return {(d.row, d.test): d.estimate for family in families if family.key == "paper" for d in family.differences}


def with_deviation(mean: float, deviation: float) -> str:
    """ "83.0 ± 2.8"; without a deviation for one seed."""
    return f"{mean:.1f}" if np.isnan(deviation) else f"{mean:.1f} ± {deviation:.1f}"


def signed(estimate: Estimate) -> str:
    """ "+1.2 [-0.3, 2.7]", in points."""
    return f"{100 * estimate.mean:+.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def markdown(results: Results, families: Sequence[ContrastFamily]) -> str:
    """The table in Markdown, padded to read well unrendered."""
    gains = _gains(families)
    columns = [*(f"@{n}" for n in results.n), "Avg."]
    grid = [["redundancy", "model", *(f"{test} {column}" for test in results.tests for column in columns)]]
    for level, row, treatment in _rows(results):
        line = [level, row_title(row) + (" + CFPRM" if treatment == "c2" else "")]
        for test in results.tests:
            line += [with_deviation(*cell) for cell in _cells(results, level, row, treatment, test)]
            if treatment == "c2" and level == results.levels[0] and (row, test) in gains:
                line[-1] += f" ({signed(gains[row, test])})"
        grid.append(line)
    return padded(grid) + "\n" + _caption(results)


def padded(grid: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is its header."""
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in grid]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def _caption(results: Results) -> str:
    seeds = len(results.seeds)
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    return (
        f"Best-of-N accuracy in %, {spread}; Avg. is the mean over n. In brackets the difference to the line above in "
        "points, with its own 95 % interval, paired by seed and question. CFPRM: windows of 2, then single steps.\n"
    )


def latex(results: Results, families: Sequence[ContrastFamily]) -> str:
    """The table in LaTeX, in the columns of the paper; needs booktabs and multirow."""
    gains = _gains(families)
    width = len(results.n) + 1
    lines = [
        r"\begin{tabular}{@{}c|c" + ("|" + "c" * width) * len(results.tests) + r"@{}}",
        r"\toprule",
        r"\multirow{2}{*}{Redundancy} & \multirow{2}{*}{Models} & "
        + " & ".join(rf"\multicolumn{{{width}}}{{c}}{{{_escaped(test)}}}" for test in results.tests)
        + r" \\",
        rf"\cmidrule(l){{3-{2 + width * len(results.tests)}}}",
        " & & " + " & ".join([*(f"@{n}" for n in results.n), "Avg."] * len(results.tests)) + r" \\",
    ]
    before = ""
    for level, row, treatment in _rows(results):
        lines.append(r"\midrule" if level != before else "")
        model = row_title(row) + (r"$_{+\text{CFPRM}}$" if treatment == "c2" else "")
        cells = []
        for test in results.tests:
            cells += [
                f"{mean:.1f}" if np.isnan(deviation) else rf"{mean:.1f}$_{{\pm {deviation:.1f}}}$"
                for mean, deviation in _cells(results, level, row, treatment, test)
            ]
            if treatment == "c2" and level == results.levels[0] and (row, test) in gains:
                gain = gains[row, test]
                cells[-1] += f" ({100 * gain.mean:+.1f} [{100 * gain.low:.1f}, {100 * gain.high:.1f}])"
        lines.append(f"{_escaped(level) if level != before else ''} & {model} & " + " & ".join(cells) + r" \\")
        before = level
    lines += [r"\bottomrule", r"\end{tabular}"]
    caption = _caption(results).strip().replace("%", r"\%").replace("±", r"$\pm$")
    return "% " + caption.replace(r"\%", "%") + "\n" + "\n".join(line for line in lines if line) + "\n"


def _escaped(text: str) -> str:
    return "".join("\\" + c if c in "&%$#_{}" else c for c in text)
