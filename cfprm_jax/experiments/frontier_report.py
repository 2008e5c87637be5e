"""What an experiment with --grid=frontier writes: a table, a plot, and all of it as JSON.

Of each treatment the learning rate is the one that is best on the validation set (where there is none, on the first
test set), by Best-of-N with the minimum, mean over seeds, questions and n. The other test sets show how good it is,
as differences to shuffling trajectories one by one with every label, for as many tokens a step and a run.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.experiments import frontier, table2
from cfprm_jax.experiments.grid import LOSSES, Cell
from cfprm_jax.experiments.intervals import Estimate, estimates
from cfprm_jax.experiments.runner import CellResult
from cfprm_jax.runtime import atomic

FILES = ("frontier.md", "frontier.png", "frontier.json")
VALIDATION = "validation"
_TOGETHER = {0: "whole records", 1: "shuffled"}
_COLOURS = {0: "#2a7f3f", 1: "#b03a2e"}


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A treatment at its chosen learning rate.

    Attributes:
      rates: learning rate to accuracy on the validation set, mean over seeds.
      tokens, steps: of a run, mean over seeds.
      right: "test set/aggregation" to what is right, [seeds, questions], mean over n.
      auroc: test set to AUROC over "all" steps and over "distinct" ones, mean over seeds.
      accuracy: test set to the accuracy by the minimum.
      difference: test set to the difference to the baseline; empty for the baseline, or without one.
    """

    level: str
    row: str
    treatment: str
    rates: dict[str, float]
    tokens: float
    steps: float
    right: dict[str, Float[np.ndarray, "seeds questions"]]
    auroc: dict[str, dict[str, float]]
    accuracy: dict[str, Estimate]
    difference: dict[str, Estimate] = dataclasses.field(default_factory=dict)


def write(directory: pathlib.Path, done: Sequence[CellResult], subsets: str, config: dict[str, Any]) -> str:
    """Write FILES into the directory of the experiment; returns the table."""
    points = chosen(done, subsets)
    text = table(points)
    atomic.write_text(directory / "frontier.md", text)
    atomic.write_json(directory / "frontier.json", {"config": config, "points": _json(points)}, indent=1)
    plot(points, directory / "frontier.png")
    return text


def chosen(done: Sequence[CellResult], subsets: str) -> list[Point]:
    """Every treatment at its best learning rate, in the order of the grid."""
    by_cell = {result.cell: result for result in done}
    seeds = sorted({cell.seed for cell in by_cell})
    tests = list(dict.fromkeys(name.rsplit("/", 2)[0] for name in done[0].right))
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in by_cell:
        names = groups.setdefault((cell.level, cell.row, frontier.without_rate(cell.treatment)), [])
        if cell.treatment not in names:
            names.append(cell.treatment)
    points = []
    for (level, row, _), names in groups.items():
        rates = {}
        for name in names:
            results = [by_cell[Cell(level, row, name, seed)] for seed in seeds]
            rates[name] = float(np.mean([result.right[f"{judge(tests)}/min/{subsets}"] for result in results]))
        best = max(rates, key=lambda name: rates[name])
        results = [by_cell[Cell(level, row, best, seed)] for seed in seeds]
        points.append(_point(level, row, best, rates=rates, results=results, tests=tests, subsets=subsets))
    return [_compared(point, points, tests) for point in points]


def judge(tests: Sequence[str]) -> str:
    """The test set that learning rates are chosen by."""
    return VALIDATION if VALIDATION in tests else tests[0]


def _point(
    level: str,
    row: str,
    name: str,
    *,
    rates: dict[str, float],
    results: Sequence[CellResult],
    tests: Sequence[str],
    subsets: str,
) -> Point:
    right = {
        f"{test}/{aggregation}": np.stack([r.right[f"{test}/{aggregation}/{subsets}"].mean(axis=1) for r in results])
        for test in tests
        for aggregation in AGGREGATIONS
    }
    known = [test for test in tests if all(test in r.summary["auroc"] for r in results)]
    return Point(
        level=level,
        row=row,
        treatment=name,
        rates={f"{frontier.treatment(other).learning_rate:g}": value for other, value in rates.items()},
        tokens=float(np.mean([r.summary["tokens"] for r in results])),
        steps=float(np.mean([r.summary["steps"] for r in results])),
        right=right,
        auroc={
            test: {
                kind: float(np.mean([r.summary["auroc"][test][kind] for r in results])) for kind in ("all", "distinct")
            }
            for test in known
        },
        accuracy={test: estimates([right[f"{test}/min"]])[0] for test in tests},
    )


def _compared(point: Point, points: Sequence[Point], tests: Sequence[str]) -> Point:
    """The point with its differences to shuffled trajectories with every label, for as many tokens."""
    own = frontier.treatment(point.treatment)
    for other in points:
        what = frontier.treatment(other.treatment)
        if (
            (other.level, other.row) == (point.level, point.row)
            and (what.batch_tokens, what.train_tokens) == (own.batch_tokens, own.train_tokens)
            and (what.record_chunk, what.label_weight, what.negative_weight) == (1, "trajectory", 1.0)
            and other is not point
        ):
            made = {test: estimates([point.right[f"{test}/min"] - other.right[f"{test}/min"]])[0] for test in tests}
            return dataclasses.replace(point, difference=made)
    return point


def title(point: Point) -> tuple[str, str, str]:
    """What stays together, what counts, the weight of negatives."""
    what = frontier.treatment(point.treatment)
    weight = "matched" if what.negative_weight == 0 else f"{what.negative_weight:g}"
    return _TOGETHER.get(what.record_chunk, f"{what.record_chunk} together"), what.label_weight, weight


def table(points: Sequence[Point]) -> str:
    """Accuracy, differences, other aggregations and AUROC of all points, in Markdown."""
    tests = list(points[0].accuracy)
    head = ["level", "loss", "batches", "counts once", "negatives", "tokens a step", "tokens", "steps", "rate"]
    grid = [[*head, *(f"{test}, min" for test in tests), *(f"{test}, difference" for test in tests)]]
    others = [["level", "loss", "batches", "counts once", "negatives", "tokens a step", "tokens"]]
    others[0] += [f"{test}, {name}" for test in tests for name in ("AUROC distinct", "AUROC all", *AGGREGATIONS)]
    for point in points:
        what = frontier.treatment(point.treatment)
        names = [point.level, LOSSES[point.row], *title(point), f"{what.batch_tokens:,}", f"{point.tokens:,.0f}"]
        accuracy = [point.accuracy[test].percent() for test in tests]
        difference = [point.difference[test].percent("+") if point.difference else "" for test in tests]
        grid.append([*names, f"{point.steps:,.0f}", f"{what.learning_rate:g}", *accuracy, *difference])
        line = []
        for test in tests:
            found = point.auroc.get(test)
            line += [f"{found[kind]:.4f}" if found else "" for kind in ("distinct", "all")]
            line += [f"{100 * point.right[f'{test}/{name}'].mean():.1f}" for name in AGGREGATIONS]
        others.append([*names, *line])
    return "\n".join(
        [
            "# Accuracy against computed tokens",
            "",
            "Best-of-N accuracy in %, the mean over n, with 95 % intervals; differences to shuffled trajectories with "
            f"every label, for as many tokens a step and a run. Learning rates are the best on {judge(tests)}.",
            "",
            table2.padded(grid),
            "# Ranking of steps, and other aggregations",
            "",
            "AUROC of the test sets' labelled steps up to each first mistake; accuracies in %.",
            "",
            table2.padded(others),
        ]
    )


def plot(points: Sequence[Point], path: pathlib.Path) -> None:
    """Accuracy over computed tokens, a panel for each loss and test set."""
    from matplotlib.figure import Figure

    rows, tests = list(dict.fromkeys(point.row for point in points)), list(points[0].accuracy)
    budgets = sorted({frontier.treatment(point.treatment).train_tokens for point in points})
    figure = Figure(figsize=(4.6 * len(tests), 3.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(tests), squeeze=False, sharex=True)
    for row, line in zip(rows, axes, strict=True):
        for test, panel in zip(tests, line, strict=True):
            curves: dict[tuple[Any, ...], list[Point]] = {}
            for point in points:
                if point.row == row:
                    key = (point.level, *title(point), frontier.treatment(point.treatment).batch_tokens)
                    curves.setdefault(key, []).append(point)
            for key, curve in curves.items():
                what = frontier.treatment(curve[0].treatment)
                curve.sort(key=lambda point: point.tokens)
                mean = np.array([100 * point.accuracy[test].mean for point in curve])
                panel.plot(
                    [point.tokens for point in curve],
                    mean,
                    marker="o",
                    linestyle="-" if what.label_weight == "node" else "--",
                    color=_COLOURS.get(what.record_chunk, "#2f6db5") if what.negative_weight == 1 else "#8a8a8a",
                    label=", ".join(map(str, key[1:])),
                )
                low = [100 * point.accuracy[test].low for point in curve]
                high = [100 * point.accuracy[test].high for point in curve]
                panel.fill_between([point.tokens for point in curve], low, high, alpha=0.08, linewidth=0)
            panel.set_xscale("log")
            panel.minorticks_off()
            panel.set_xticks(budgets, [f"{budget / 1e6:g} million" for budget in budgets])
            panel.set_title(f"{LOSSES[row]}, {test}")
            panel.set_xlabel("computed tokens")
            panel.set_ylabel("Best-of-N accuracy, %")
    axes[0][0].legend(fontsize=6, title="batches, counts once, negatives, tokens a step", title_fontsize=6)
    # Neither date nor version in the file: the same results give the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [
        {
            **{
                name: getattr(point, name)
                for name in ("level", "row", "treatment", "rates", "tokens", "steps", "auroc")
            },
            "options": dataclasses.asdict(frontier.treatment(point.treatment)),
            "accuracy_by_seed": {name: right.mean(axis=1).tolist() for name, right in point.right.items()},
            "accuracy": {test: dataclasses.asdict(found) for test, found in point.accuracy.items()},
            "difference": {test: dataclasses.asdict(found) for test, found in point.difference.items()},
        }
        for point in points
    ]
