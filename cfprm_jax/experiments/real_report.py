"""What an experiment with --grid=real writes: tables, findings in words, a plot, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cfprm_jax.experiments import table2
from cfprm_jax.experiments.grid import ROWS, Cell
from cfprm_jax.experiments.real import CONTRASTS, what
from cfprm_jax.experiments.real_data import EvaluationSets
from cfprm_jax.experiments.real_metrics import (
    Bootstrap,
    Interval,
    Metric,
    metrics,
    position_auroc,
    position_correlation,
)
from cfprm_jax.experiments.real_runner import RealResult
from cfprm_jax.runtime import atomic
from cfprm_jax.runtime.progress import duration

FILES = ("real.md", "real.png", "results.json")
_COLOURS = {"expanded": "#b03a2e", "each_once": "#2a7f3f", "c2": "#2f6db5", "plain_matched": "#8a8a8a"}


class Group(NamedTuple):
    """The cells of a row and a treatment.

    Attributes:
      title: of the treatment.
      values: metric to its interval.
      by_position: of each seed, the correlation of the held-out steps' scores with their index; empty without any.
    """

    row: str
    treatment: str
    title: str
    results: list[RealResult]
    values: dict[str, Interval]
    by_position: list[float | None]


class Difference(NamedTuple):
    """A treatment less another one, of the seeds that both have."""

    row: str
    better: str
    than: str
    seeds: int
    values: dict[str, Interval]


class Findings(NamedTuple):
    """What cells found.

    Attributes:
      position: AUROC of the held-out steps by their index alone; None without held-out data.
    """

    metrics: list[str]
    groups: list[Group]
    differences: list[Difference]
    position: float | None = None


def find(
    done: Sequence[RealResult], sets: EvaluationSets, sizes: Sequence[int], subsets: str, resamples: int
) -> Findings:
    """Metrics of every row and treatment, and their differences.

    Args:
      done: some or all cells of the grid.
    """
    bootstrap = Bootstrap(resamples)
    tables: dict[Cell, dict[str, np.ndarray]] = {}
    by_name: dict[str, Metric] = {}
    for result in done:
        known: list[Metric] = metrics(sets, sizes, result.cell.aggregation, subsets)
        by_name = {metric.name: metric for metric in known}
        tables[result.cell] = {metric.name: bootstrap.table(metric, [result.arrays]) for metric in known}
    members: dict[tuple[str, str], list[RealResult]] = {}
    for result in done:
        members.setdefault((result.cell.row, result.cell.treatment), []).append(result)
    groups = []
    for (row, treatment), own in members.items():
        values = {
            name: bootstrap.metric(metric, np.concatenate([tables[one.cell][name] for one in own]))
            for name, metric in by_name.items()
        }
        held_out = sets.held_out
        by_position = [] if held_out is None else [position_correlation(held_out, one.arrays) for one in own]
        groups.append(Group(row, treatment, what(own[0].cell).title, own, values, by_position))
    differences = []
    for row in dict.fromkeys(group.row for group in groups):
        for one, other in CONTRASTS:
            pairs = [
                (result.cell, dataclasses.replace(result.cell, treatment=other))
                for result in members.get((row, one), [])
                if dataclasses.replace(result.cell, treatment=other) in tables
            ]
            if pairs:
                values = {
                    name: bootstrap.difference(
                        metric, np.concatenate([tables[a][name] - tables[b][name] for a, b in pairs])
                    )
                    for name, metric in by_name.items()
                }
                differences.append(Difference(row, one, other, len(pairs), values))
    position = None if sets.held_out is None else position_auroc(sets.held_out)
    return Findings(list(by_name), groups, differences, position)


def write(
    directory: pathlib.Path,
    done: Sequence[RealResult],
    sets: EvaluationSets,
    *,
    cells: int,
    sizes: Sequence[int],
    subsets: str,
    resamples: int,
    config: dict[str, Any],
) -> str:
    """Write FILES into the directory of the experiment.

    Args:
      done: results so far.
      cells: of the whole grid.

    Returns:
      The text of real.md.
    """
    found = find(done, sets, sizes, subsets, resamples)
    text = page(found, len(done), cells)
    atomic.write_text(directory / FILES[0], text)
    plot(found, directory / FILES[1])
    atomic.write_json(directory / FILES[2], _json(found, len(done), cells, config), indent=1)
    return text


def page(found: Findings, done: int, cells: int) -> str:
    """Tables and findings, in Markdown."""
    head = ["loss", "treatment", "seeds", "steps", "tokens", "train", "evaluate"]
    grid = [[*head, *found.metrics]]
    for group in found.groups:
        summaries = [result.summary for result in group.results]

        def mean(name: str, summaries: list[dict[str, Any]] = summaries) -> float:
            return float(np.mean([summary[name] for summary in summaries]))

        grid.append(
            [
                ROWS[group.row],
                group.title,
                str(len(group.results)),
                f"{mean('steps'):,.0f}",
                f"{mean('tokens'):,.0f}",
                duration(mean("train_seconds")),
                duration(mean("evaluation_seconds")),
                *(_shown(group.values[name]) for name in found.metrics),
            ]
        )
    differences = [["loss", "difference", "seeds", *found.metrics]]
    for one in found.differences:
        title = f"{one.better} - {one.than}"
        differences.append([ROWS[one.row], title, str(one.seeds), *(_shown(one.values[n], "+") for n in found.metrics)])
    parts = [
        "# Real weights and labels",
        f"{done} of {cells} cells. In points of 100, means over seeds, with 95 % intervals: Student's t of the "
        "variance over seeds and of a bootstrap over records (questions of the pool, solutions of ProcessBench). "
        "AUROC, negative F1 (a step is called wrong at a score of at most 0.5) and first error (share of a record's "
        "solutions whose first error, or none, is found at 0.5) are of distinct held-out steps and held-out records. "
        "Sibling AUROC is of pairs of a right and a wrong step after the same steps. Tokens are computed ones, and "
        "times those of a run.",
        table2.padded(grid).rstrip(),
    ]
    if found.position is not None:
        parts.append(
            f"The index of a step alone, the earlier of two scored higher, has an AUROC of {100 * found.position:.1f}, "
            "and a sibling AUROC of 50. Spearman's correlation of scores with it, of each seed:"
        )
        parts.append(
            "\n".join(f"- {ROWS[group.row]}, {group.title}: {_plain(group.by_position)}" for group in found.groups)
        )
    if found.differences:
        parts += [
            "# Differences",
            "Paired by seed and record: each_once - expanded has as many computed tokens, c2 - each_once twice "
            "the steps (ORM, whose c2 is whole, 2, 1: three times), c2 - plain_matched as many steps.",
            table2.padded(differences).rstrip(),
            "# Findings",
            "\n".join(f"- {sentence}" for sentence in sentences(found)),
        ]
    return "\n\n".join(parts) + "\n"


def sentences(found: Findings) -> list[str]:
    """What the intervals of each comparison support, by a rule that is the same whichever way they fall."""
    out = []
    titles = {(group.row, group.treatment): group.title for group in found.groups}
    for one in found.differences:
        by_sign: dict[int, list[str]] = {1: [], -1: [], 0: []}
        for name in found.metrics:
            value = one.values[name]
            by_sign[value.sign].append(f"{name} {_shown(value, '+')}")
        treatment, other = (titles[one.row, name] for name in (one.better, one.than))
        parts = [
            f"{words}: {', '.join(by_sign[sign])}"
            for sign, words in ((1, "higher"), (-1, "lower"), (0, "not decided"))
            if by_sign[sign]
        ]
        seeds = f"{one.seeds} seed{'s' * (one.seeds > 1)}"
        out.append(f"{ROWS[one.row]}, {treatment} against {other} ({seeds}): {'; '.join(parts)}.")
    return out


def _shown(value: Interval, sign: str = "") -> str:
    if not np.isfinite(value.mean):
        return "-"
    return f"{100 * value.mean:{sign}.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def _plain(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.2f}" for value in values)


def plot(found: Findings, path: pathlib.Path) -> None:
    """Every metric of every row and treatment with its interval, a panel for each metric."""
    from matplotlib.figure import Figure

    columns = min(3, len(found.metrics))
    lines = -(-len(found.metrics) // columns)
    height = 0.9 + 0.28 * len(found.groups)
    figure = Figure(figsize=(4.4 * columns, height * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    names = [f"{ROWS[group.row]}, {group.title}" for group in found.groups]
    for panel, metric in zip(panels, found.metrics, strict=False):
        for place, group in enumerate(found.groups):
            value = group.values[metric]
            colour = _COLOURS[group.treatment]
            panel.plot([100 * value.low, 100 * value.high], [place, place], color=colour, linewidth=2)
            panel.plot([100 * x for x in value.by_seed], [place] * len(value.by_seed), "|", color=colour, markersize=9)
            panel.plot([100 * value.mean], [place], "o", color=colour)
        panel.set_title(metric, fontsize=9)
        panel.set_yticks(range(len(names)), names, fontsize=7)
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="x", alpha=0.3)
    panels[0].invert_yaxis()
    for panel in panels[len(found.metrics) :]:
        panel.set_visible(False)
    # Neither date nor version in the file: the same results give the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _json(found: Findings, done: int, cells: int, config: dict[str, Any]) -> dict[str, Any]:
    def plain(values: dict[str, Interval]) -> dict[str, Any]:
        return {
            name: {k: _finite(v) for k, v in dataclasses.asdict(interval).items()} for name, interval in values.items()
        }

    return {
        "config": config,
        "cells": {"done": done, "all": cells},
        "position_auroc": None if found.position is None else _finite(found.position),
        "groups": [
            {
                "row": group.row,
                "treatment": group.treatment,
                "seeds": [result.cell.seed for result in group.results],
                "runs": [result.summary for result in group.results],
                "position_correlation": group.by_position,
                "metrics": plain(group.values),
            }
            for group in found.groups
        ],
        "differences": [
            {"row": d.row, "treatment": d.better, "than": d.than, "seeds": d.seeds, "metrics": plain(d.values)}
            for d in found.differences
        ],
        "findings": sentences(found),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return value if np.isfinite(value) else None
