"""What tables and plots show of results.json: names of methods, data sets as columns, and lines over n."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.evaluation.breakdown import DATASET

_NAMES = {
    "best_of_n": "best of n",
    "weighted_vote": "weighted vote",
    "majority": "majority vote",
    "pass_at_1": "pass@1",
    "first": "first candidate",
    "oracle": "oracle",
}
_DATASETS = {"math500": "MATH500", "gsm_plus": "GSM-Plus", "gsm8k": "GSM8K", "gsmplus": "GSM-Plus"}

Cell = Mapping[str, Any]
"""A row of results.json."""

Line = tuple[str, str | None]
"""Method and aggregation."""


def name(method: str, aggregation: str | None) -> str:
    """A method in words."""
    return _NAMES[method] + (f", {aggregation}" if aggregation else "")


def dataset_name(name: str) -> str:
    """A data set as it is written in tables."""
    return _DATASETS.get(name, name)


@dataclasses.dataclass(frozen=True)
class Column:
    """A data set, or all questions where there is only one.

    Attributes:
      title: its name; "" for all questions.
      questions: how many it has.
      rows: its accuracies.
      rows2: those of the second system; none without one.
    """

    title: str
    questions: int
    rows: Sequence[Cell]
    rows2: Sequence[Cell]


def columns(outcome: Mapping[str, Any]) -> list[Column]:
    """The data sets that the results have, each on its own."""
    found = [
        Column(dataset_name(part["value"]), part["questions"], part["rows"], part["rows2"])
        for part in outcome["parts"]
        if part["by"] == DATASET
    ]
    title = dataset_name(outcome["datasets"][0]) if len(outcome["datasets"]) == 1 else ""
    return found or [Column(title, outcome["questions"], outcome["rows"], outcome["rows2"])]


def lines(rows: Sequence[Cell]) -> list[Line]:
    """Methods and aggregations in their order."""
    return list(dict.fromkeys((row["method"], row["aggregation"]) for row in rows))


def sizes(rows: Sequence[Cell]) -> list[int]:
    """Every n in its order."""
    return list(dict.fromkeys(row["n"] for row in rows))


def cells(rows: Sequence[Cell]) -> dict[tuple[str, str | None, int], Cell]:
    """The rows by method, aggregation and n."""
    return {(row["method"], row["aggregation"], row["n"]): row for row in rows}


def own_lines(outcome: Mapping[str, Any]) -> list[Line]:
    """The lines of the second system that differ from the first one's anywhere: votes may not use the scores."""
    first, second = cells(outcome["rows"]), cells(outcome["rows2"])
    return [
        line
        for line in lines(outcome["rows2"])
        if any(first[(*line, n)]["accuracy"] != second[(*line, n)]["accuracy"] for n in sizes(outcome["rows2"]))
        or line[1] is not None
    ]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a plot: accuracies over n with their intervals."""

    name: str
    points: tuple[tuple[int, float, float, float], ...]


def curves(outcome: Mapping[str, Any], column: Column) -> list[Curve]:
    """What a plot can show without being a tangle: Best-of-N by every aggregation, and else the first aggregation only.

    The first candidate is left out; pass@1 is its expectation.
    """
    aggregation = outcome["config"]["aggregation"][0]
    system, second = outcome["systems"][0], outcome["systems"][1:]

    def curve(rows: Sequence[Cell], line: Line, prefix: str = "") -> Curve:
        picked = sorted((row for row in rows if (row["method"], row["aggregation"]) == line), key=lambda row: row["n"])
        points = tuple((row["n"], row["accuracy"], *row["ci95"]) for row in picked)
        return Curve(prefix + name(*line), points)

    prefix = f"{system}: " if second else ""
    found = [curve(column.rows, ("oracle", None)), curve(column.rows, ("weighted_vote", aggregation), prefix)]
    found += [
        curve(column.rows, ("best_of_n", each), prefix)
        for each in ([aggregation] if second else outcome["config"]["aggregation"])
    ]
    for other in second:
        found.append(curve(column.rows2, ("best_of_n", aggregation), f"{other}: "))
        found.append(curve(column.rows2, ("weighted_vote", aggregation), f"{other}: "))
    return [*found, curve(column.rows, ("majority", None)), curve(column.rows, ("pass_at_1", None))]
