"""The results as tables: Markdown to read, LaTeX in the form of the paper's main table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.evaluation.breakdown import DATASET
from cfprm_jax.report.series import Cell, Line, cells, columns, lines, name, own_lines, sizes
from cfprm_jax.runtime.progress import counted

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"}
# A p-value below this is written as such.
_SMALL_P = 0.001

Grid = list[list[str]]
"""Rows of texts, the first the headings."""


def rows_table(rows: Sequence[Cell], shown: Sequence[Line] | None = None) -> Grid:
    """A line a method and aggregation, a column an n.

    Args:
      rows: of results.json.
      shown: the methods and aggregations; None is all of them.
    """
    found, every = cells(rows), sizes(rows)
    grid = [["method", *(f"n = {n}" for n in every)]]
    for line in lines(rows) if shown is None else shown:
        grid.append([name(*line), *(cell(found[(*line, n)]) for n in every)])
    return grid


def main_table(outcome: Mapping[str, Any]) -> Grid:
    """The accuracies of both systems; with several data sets they are the first column.

    What does not depend on the scores, and is the same for both systems, is there once.
    """
    columns_shown, second = columns(outcome), outcome["systems"][1:]
    own = own_lines(outcome) if second else []
    grid: Grid = []
    for column in columns_shown:
        head, *first = rows_table(column.rows)
        if second:
            _call(first, [outcome["systems"][0] if line in own else "" for line in lines(column.rows)])
            others = rows_table(column.rows2, own)[1:]
            _call(others, [second[0]] * len(others))
            first += others
        if len(columns_shown) > 1:
            head, first = ["data set", *head], [[column.title, *line] for line in first]
        grid += first if grid else [head, *first]
    return grid


def _call(lines_of_table: Grid, systems: Sequence[str]) -> None:
    """Put the system's name before the method, where it has one."""
    for line, system in zip(lines_of_table, systems, strict=True):
        if system:
            line[0] = f"{system}: {line[0]}"


def cell(row: Cell) -> str:
    """An accuracy in %, with draws their standard deviation after a ±, and the interval."""
    spread = "" if row["draw_std"] is None else f" ± {100 * row['draw_std']:.1f}"
    return f"{100 * row['accuracy']:.1f}{spread} [{100 * row['ci95'][0]:.1f}, {100 * row['ci95'][1]:.1f}]"


def comparison_table(outcome: Mapping[str, Any]) -> Grid:
    """The differences of the two systems in percentage points, where they can differ."""
    first, second = outcome["systems"]
    grid = [["method", "n", first, second, "difference", "95 % interval", "p"]]
    for row in outcome["comparison"]:
        if (row["method"], row["aggregation"]) in own_lines(outcome):
            low, high = row["ci95"]
            grid.append(
                [
                    name(row["method"], row["aggregation"]),
                    str(row["n"]),
                    f"{100 * row['accuracy']:.1f}",
                    f"{100 * row['accuracy2']:.1f}",
                    f"{100 * row['difference']:+.1f}",
                    f"[{100 * low:+.1f}, {100 * high:+.1f}]",
                    _p_value(row["p_value"]),
                ]
            )
    return grid


def equal_cost_table(outcome: Mapping[str, Any]) -> Grid:
    """A line an aggregation: both systems' FLOPs and accuracy, and their difference."""
    first, second = outcome["systems"]
    grid = [["score", f"{first}: FLOPs", first, "n", f"{second}: FLOPs", second, "difference", "95 % interval", "p"]]
    for row in outcome["equal_cost"]:
        low, high = row["ci95"]
        grid.append(
            [
                row["aggregation"],
                f"{row['flops']:.3g}",
                f"{100 * row['accuracy']:.1f}",
                str(row["n"]),
                f"{row['flops2']:.3g}",
                f"{100 * row['accuracy2']:.1f}",
                f"{100 * row['difference']:+.1f}",
                f"[{100 * low:+.1f}, {100 * high:+.1f}]",
                _p_value(row["p_value"]),
            ]
        )
    return grid


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= _SMALL_P else f"< {_SMALL_P}"


def part_tables(outcome: Mapping[str, Any]) -> list[tuple[str, Grid]]:
    """For each way to divide the questions its title and a table: accuracies at the largest n by part.

    With two systems both are there with the first aggregation only.
    """
    largest = max(sizes(outcome["rows"]))
    aggregation, *others = outcome["config"]["aggregation"]
    first, *second = outcome["systems"]
    prefix = f"{first}: " if second else ""
    shown: list[tuple[str, str, Line]] = [(prefix, "rows", ("best_of_n", aggregation))]
    if second:
        shown.append((f"{second[0]}: ", "rows2", ("best_of_n", aggregation)))
    else:
        shown += [("", "rows", ("best_of_n", other)) for other in others]
    shown.append((prefix, "rows", ("weighted_vote", aggregation)))
    shown += [("", "rows", (method, None)) for method in ("majority", "pass_at_1", "oracle")]
    ways = list(dict.fromkeys(part["by"] for part in outcome["parts"] if part["by"] != DATASET))
    out = []
    for by in ways:
        grid = [[by.replace("_", " "), "questions", *(label + name(*line) for label, _, line in shown)]]
        for part in outcome["parts"]:
            if part["by"] == by:
                accuracies = (cell(cells(part[rows])[(*line, largest)]) for _, rows, line in shown)
                grid.append([part["value"], f"{part['questions']:,}", *accuracies])
        out.append((f"By {by.replace('_', ' ')}, n = {largest}", grid))
    return out


def correlation_table(outcome: Mapping[str, Any]) -> Grid:
    """A line an aggregation, a column a quantity and a set of candidates."""
    found = outcome["correlations"]
    heads = list(dict.fromkeys((entry["quantity"], entry["candidates"]) for entry in found))
    grid = [["score", *(f"{quantity}, {candidates}" for quantity, candidates in heads)]]
    for aggregation in outcome["config"]["aggregation"]:
        values = {(e["quantity"], e["candidates"]): e["spearman"] for e in found if e["aggregation"] == aggregation}
        grid.append([aggregation, *("-" if values[key] is None else f"{values[key]:+.2f}" for key in heads)])
    return grid


def markdown(grid: Grid) -> str:
    """A Markdown table, its columns padded so that it reads well unrendered too."""
    grid = [[text.replace("|", "\\|") for text in line] for line in grid]
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in grid
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text) + "\n"


def latex(outcome: Mapping[str, Any]) -> str:
    r"""A table* like the paper's main table: a row a system, for each data set a column an n and their average.

    Requires the packages booktabs, multirow and graphicx. Each aggregation has its own row; methods without scores
    follow below a rule.
    """
    shown = columns(outcome)
    every = sizes(outcome["rows"])
    several = len(outcome["config"]["aggregation"]) > 1
    aggregations = outcome["config"]["aggregation"]

    def system(label: str, aggregation: str) -> str:
        return escaped(f"{label} ({aggregation})" if several else label)

    blocks: list[list[tuple[str, list[Sequence[Cell]], tuple[str, str | None]]]] = []
    for place, label in enumerate(outcome["systems"]):
        rows = [column.rows2 if place else column.rows for column in shown]
        blocks.append([(system(label, each), rows, ("best_of_n", each)) for each in aggregations])
    first = [column.rows for column in shown]
    others: list[tuple[str, str | None]] = [("majority", None), ("pass_at_1", None), ("oracle", None)]
    blocks.append([(escaped(name(*line)), first, line) for line in others])

    last = 2 + len(shown) * (len(every) + 1)
    out = [
        r"\begin{table*}[h]",
        rf"\caption{{Best-of-N accuracy in \%. {escaped(_caption_end(outcome))}}}",
        r"\resizebox{\linewidth}{!}{",
        r"\begin{tabular}{@{}c|c|" + "|".join("c" * (len(every) + 1) for _ in shown) + "@{}}",
        r"\toprule",
        r"\multirow{2}{*}{Version} & \multirow{2}{*}{Models}"
        + "".join(
            rf" & \multicolumn{{{len(every)}}}{{c}}{{{escaped(column.title or 'All questions')}}} &" for column in shown
        )
        + rf" \\ \cmidrule(l){{3-{last}}}",
        " & " + "".join("".join(f" & @{n}" for n in every) + " & Avg." for _ in shown) + r" \\ \midrule",
    ]
    total = sum(map(len, blocks))
    for number, block in enumerate(blocks):
        for place, (label, rows, line) in enumerate(block):
            start = (
                rf"\multirow{{{total}}}{{*}}{{{escaped(outcome['config']['policy'])}}}" if not number + place else ""
            )
            end = r" \\" + (
                rf" \cmidrule(l){{2-{last}}}" if place == len(block) - 1 and number < len(blocks) - 1 else ""
            )
            out.append(f"{start} & {label} & " + " & ".join(_averaged(of, line, every) for of in rows) + end)
    out += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}", ""]
    return "\n".join(out)


def _averaged(rows: Sequence[Cell], line: tuple[str, str | None], every: Sequence[int]) -> str:
    found = cells(rows)
    values = [100 * found[(*line, n)]["accuracy"] for n in every]
    return " & ".join(f"{value:.1f}" for value in [*values, sum(values) / len(values)])


def _caption_end(outcome: Mapping[str, Any]) -> str:
    config = outcome["config"]
    how = f"means over {counted(config['draws'], 'random subset')}" if config["draws"] else "the first n candidates"
    return f"{how[0].upper()}{how[1:]}; grader {config['grader']}; {counted(outcome['questions'], 'question')}."


def escaped(text: str) -> str:
    """Text for LaTeX."""
    return "".join(_LATEX.get(character, character) for character in text)
