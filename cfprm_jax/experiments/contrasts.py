"""The questions that are put to the grid, each a family of differences between two treatments.

A difference is paired by seed and question, and is of the mean accuracy over all n ("Avg." of the paper's table).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from cfprm_jax.experiments.grid import LOSSES, ORM, ROWS, TREATMENTS, Cell
from cfprm_jax.experiments.intervals import Estimate, estimates
from cfprm_jax.experiments.runner import CellResult


class Results:
    """The grid's results by name, with one way of choosing candidates.

    Attributes:
      tests: names of the test sets.
      levels: names of the levels, the first being that of the table.
      rows: rows of the table that have cells.
      n: numbers of candidates.
    """

    def __init__(self, results: Sequence[CellResult], subsets: str) -> None:
        self._subsets = subsets
        self._by_cell = {result.cell: result for result in results}
        names = [name.rsplit("/", 2)[0] for name in results[0].right]
        self.tests = tuple(dict.fromkeys(names))
        self.levels = tuple(dict.fromkeys(result.cell.level for result in results))
        self.rows = tuple(row for row in ROWS if any(result.cell.row == row for result in results))
        self.seeds = tuple(sorted({result.cell.seed for result in results}))
        self.n = tuple(results[0].summary["n"])

    def __len__(self) -> int:
        return len(self._by_cell)

    def has(self, level: str, row: str, treatment: str) -> bool:
        """Whether there are such cells."""
        return Cell(level, row, treatment, self.seeds[0]) in self._by_cell

    def right(self, level: str, row: str, treatment: str, test: str) -> Float[np.ndarray, "seeds questions n"]:
        """What every seed's run gets right."""
        cells = [Cell(level, row, treatment, seed) for seed in self.seeds]
        return np.stack([self._by_cell[c].right[f"{test}/{c.aggregation}/{self._subsets}"] for c in cells])

    def mean(self, level: str, row: str, treatment: str, test: str) -> Float[np.ndarray, "seeds questions"]:
        """The same, averaged over n."""
        return self.right(level, row, treatment, test).mean(axis=2)

    def steps(self, level: str, row: str, treatment: str) -> float:
        """Optimizer steps, the mean over seeds."""
        return float(np.mean([self._by_cell[Cell(level, row, treatment, s)].summary["steps"] for s in self.seeds]))

    def tokens(self, level: str, row: str, treatment: str) -> float:
        """Tokens computed in training, the mean over seeds."""
        return float(np.mean([self._by_cell[Cell(level, row, treatment, s)].summary["tokens"] for s in self.seeds]))


@dataclasses.dataclass(frozen=True)
class Contrast:
    """One difference: accuracy of treatment minus that of baseline, at a level, in a row, on a test set."""

    level: str
    row: str
    treatment: str
    baseline: str
    test: str
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class ContrastFamily:
    """Differences that answer one question together.

    Attributes:
      key: short name.
      question: that it answers.
      better: the meaning of a difference above 0.
      differences: one a row and test set; their family intervals hold at once.
      pooled: the mean over all of them, each having equal weight: losses, test sets, and where a family has several
        treatments (the sweep: C=3 and C=4) these too.
    """

    key: str
    question: str
    better: str
    differences: tuple[Contrast, ...]
    pooled: Estimate


def families(results: Results) -> list[ContrastFamily]:
    """The families that the grid has cells for."""
    first = results.levels[0]
    losses = [row for row in results.rows if row != ORM]
    found = [
        _family(
            results,
            "paper",
            "Is coarse-to-fine (C=2) better than plain training on the same data? (The paper's comparison.)",
            "coarse-to-fine is better than plain training",
            [(first, row, "c2", "plain") for row in results.rows],
        ),
        _family(
            results,
            "steps",
            "Is plain training better when it takes as many steps as coarse-to-fine?",
            "more steps alone help plain training",
            [(first, row, "plain_matched", "plain") for row in losses],
        ),
        _family(
            results,
            "windows",
            "Is coarse-to-fine (C=2) better than plain training of as many steps?",
            "the windows help beyond the steps that they add",
            [(first, row, "c2", "plain_matched") for row in losses],
        ),
        _family(
            results,
            "order",
            "Does the order matter: coarse to fine against the same data shuffled?",
            "coarse to fine is better than shuffled",
            [(first, row, "c2", "shuffled") for row in losses],
        ),
        _family(
            results,
            "reverse",
            "Does the order matter: coarse to fine against fine to coarse?",
            "coarse to fine is better than fine to coarse",
            [(first, row, "c2", "fine_to_coarse") for row in losses],
        ),
        _family(
            results,
            "sweep",
            "Which C: windows of 3 and of 4 against windows of 2, all of as many steps?",
            "larger windows are better",
            [(first, row, treatment, "c2") for treatment in ("c3", "c4") for row in losses],
        ),
        *(
            _family(
                results,
                f"windows_{level}",
                f"The same question about windows where the redundancy is {level!r}.",
                "the windows help beyond the steps that they add",
                [(level, row, "c2", "plain_matched") for row in losses],
            )
            for level in results.levels[1:]
        ),
        _family(
            results,
            "grouping",
            "Does it matter that tree packing keeps the trajectories of a record together? Against trajectories "
            "shuffled one by one, for as many trajectories.",
            "keeping records together is better for as many trajectories",
            [(first, row, "grouped", "plain") for row in losses],
        ),
        _family(
            results,
            "grouping_4",
            "The same with at most 4 trajectories of a record together (--record_chunk=4).",
            "keeping 4 of a record together is better for as many trajectories",
            [(first, row, "grouped_4", "plain") for row in losses],
        ),
        _family(
            results,
            "grouping_compute",
            "Whole records together, for as many computed tokens: trajectories shuffled one by one share no prefixes, "
            "so fewer of them are trained on.",
            "keeping records together is better at equal compute",
            [(first, row, "grouped", "plain_compute") for row in losses],
        ),
        _family(
            results,
            "grouping_4_compute",
            "At most 4 of a record together, for as many computed tokens.",
            "keeping 4 of a record together is better at equal compute",
            [(first, row, "grouped_4", "plain_compute_4") for row in losses],
        ),
    ]
    return [family for family in (*found, *_interaction(results, losses)) if family is not None and family.differences]


def _family(
    results: Results, key: str, question: str, better: str, pairs: Sequence[tuple[str, str, str, str]]
) -> ContrastFamily | None:
    there = [
        (level, row, treatment, baseline, test)
        for level, row, treatment, baseline in pairs
        if results.has(level, row, treatment) and results.has(level, row, baseline)
        for test in results.tests
    ]
    tables = [
        results.mean(level, row, treatment, test) - results.mean(level, row, baseline, test)
        for level, row, treatment, baseline, test in there
    ]
    return _made(results, key, question, better=better, there=there, tables=tables)


def _interaction(results: Results, losses: Sequence[str]) -> list[ContrastFamily | None]:
    """The gain from windows at most redundancy minus that at none, if both levels are there."""
    if not {"none", "much"} <= set(results.levels):
        return []
    there, tables = [], []
    for row in losses:
        if all(results.has(level, row, t) for level in ("none", "much") for t in ("c2", "plain_matched")):
            for test in results.tests:
                gains = [
                    results.mean(level, row, "c2", test) - results.mean(level, row, "plain_matched", test)
                    for level in ("much", "none")
                ]
                there.append(("much - none", row, "c2", "plain_matched", test))
                tables.append(gains[0] - gains[1])
    question = (
        "Do windows help more the more redundant the steps are? (The paper's explanation.) Gain of C=2 over plain of "
        "as many steps at 'much', minus that at 'none'."
    )
    return [
        _made(
            results,
            "redundancy",
            question,
            better="windows help more where steps are redundant",
            there=there,
            tables=tables,
        )
    ]


def _made(
    results: Results,
    key: str,
    question: str,
    *,
    better: str,
    there: Sequence[tuple[str, str, str, str, str]],
    tables: Sequence[Float[np.ndarray, "seeds questions"]],
) -> ContrastFamily | None:
    if not there:
        return None
    differences = tuple(Contrast(*what, estimate) for what, estimate in zip(there, estimates(tables), strict=True))
    # Test sets have questions of their own, and the same ones for every loss.
    by_test = [
        np.mean([t for t, what in zip(tables, there, strict=True) if what[4] == test], axis=0) for test in results.tests
    ]
    (pooled,) = estimates([_stratified(by_test)])
    return ContrastFamily(key, question, better, differences, pooled)


def _stratified(tables: Sequence[Float[np.ndarray, "seeds questions"]]) -> Float[np.ndarray, "seeds questions"]:
    """One table whose mean is the mean of the tables' means, whatever their numbers of questions."""
    total = sum(table.shape[1] for table in tables)
    return np.concatenate([table * (total / (len(tables) * table.shape[1])) for table in tables], axis=1)


def title(treatment: str) -> str:
    """Of a treatment, in tables."""
    return TREATMENTS[treatment].title


def row_title(row: str) -> str:
    """Of a row, in tables."""
    return {ORM: "ORM", **LOSSES}[row]
