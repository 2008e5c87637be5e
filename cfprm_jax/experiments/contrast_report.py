"""What an experiment with --grid=oracle or labels writes: accuracy, chosen differences, and all of it as JSON.

Every difference is paired by seed and question, of the mean accuracy over n. Those of one pair of treatments, level and
loss on the single test sets are a family, whose family intervals (in the JSON) hold at once; the tables have the
interval of each difference by itself.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cfprm_jax.experiments import oracle, rolled, table2
from cfprm_jax.experiments.contrasts import Results
from cfprm_jax.experiments.grid import LOSSES
from cfprm_jax.experiments.intervals import Estimate, estimates
from cfprm_jax.experiments.runner import CellResult
from cfprm_jax.experiments.treatment import Treatment
from cfprm_jax.runtime import atomic


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What a grid compares.

    Attributes:
      name: of the files, NAME.md and NAME.json.
      title, regime: of the tables.
      treatments: by name.
      pairs: a treatment, and what it is compared with.
    """

    name: str
    title: str
    regime: str
    treatments: Mapping[str, Treatment]
    pairs: tuple[tuple[str, str], ...]

    @property
    def files(self) -> tuple[str, ...]:
        """What is written."""
        return f"{self.name}.md", f"{self.name}.json"


COMPARISONS = {
    "oracle": Comparison(
        "oracle",
        "Windows of redundant steps",
        "whole records, each label once, as many steps as C=2 and then 1 take",
        oracle.TREATMENTS,
        oracle.CONTRASTS,
    ),
    "labels": Comparison(
        "labels",
        "Kinds of step labels",
        "whole records, each label once, the same solutions, rollouts and number of steps",
        rolled.TREATMENTS,
        rolled.CONTRASTS,
    ),
}
"""By --grid."""


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Accuracy of treatment minus that of baseline; test is "all" for the mean over the test sets."""

    level: str
    row: str
    treatment: str
    baseline: str
    test: str
    estimate: Estimate


def write(
    directory: pathlib.Path, what: Comparison, done: Sequence[CellResult], subsets: str, config: dict[str, Any]
) -> str:
    """Write the files of a comparison into the directory of the experiment; returns the tables."""
    results = Results(done, subsets)
    found = contrasts(what, results)
    text = tables(what, results, found)
    tables_file, figures_file = what.files
    atomic.write_text(directory / tables_file, text)
    cells = [
        {"level": r.cell.level, "row": r.cell.row, "treatment": r.cell.treatment, "seed": r.cell.seed, **r.summary}
        for r in done
    ]
    content = {"config": config, "contrasts": [dataclasses.asdict(one) for one in found], "cells": cells}
    atomic.write_json(directory / figures_file, content, indent=1)
    return text


def contrasts(what: Comparison, results: Results) -> list[PairedDifference]:
    """All differences of a comparison whose treatments have cells, by test set and over all of them."""
    out = []
    for level in results.levels:
        for row in results.rows:
            for treatment, baseline in what.pairs:
                if not (results.has(level, row, treatment) and results.has(level, row, baseline)):
                    continue
                tables = [
                    results.mean(level, row, treatment, test) - results.mean(level, row, baseline, test)
                    for test in results.tests
                ]
                named = dict(zip(results.tests, estimates(tables), strict=True))
                # Test sets have questions of their own, side by side.
                named["all"] = estimates([np.concatenate(tables, axis=1)])[0]
                out += [PairedDifference(level, row, treatment, baseline, test, made) for test, made in named.items()]
    return out


def tables(what: Comparison, results: Results, found: Sequence[PairedDifference]) -> str:
    """Accuracy of every treatment and all differences, if there are any, in Markdown."""
    head = ["level", "loss", "treatment", "steps", "tokens", *results.tests]
    accuracy = [head]
    for level in results.levels:
        for row in results.rows:
            for name, treatment in what.treatments.items():
                if results.has(level, row, name):
                    shown = [estimates([results.mean(level, row, name, test)])[0].percent() for test in results.tests]
                    size = [f"{results.steps(level, row, name):,.0f}", f"{results.tokens(level, row, name):,.0f}"]
                    accuracy.append([level, LOSSES[row], treatment.title, *size, *shown])
    differences = [["level", "loss", "difference", *results.tests, "all"]]
    grouped: dict[tuple[str, str, str, str], dict[str, Estimate]] = {}
    for one in found:
        key = (one.level, one.row, one.treatment, one.baseline)
        grouped.setdefault(key, {})[one.test] = one.estimate
    for (level, row, name, baseline), by_test in grouped.items():
        title = f"{what.treatments[name].title}, minus {what.treatments[baseline].title}"
        differences.append([level, LOSSES[row], title, *(made.percent("+") for made in by_test.values())])
    seeds = f"{len(results.seeds)} seed{'' if len(results.seeds) == 1 else 's'}"
    lines = [
        f"# {what.title}",
        "",
        f"Best-of-N accuracy in %, the mean over n, {seeds}, with 95 % intervals; {what.regime}.",
        "",
        table2.padded(accuracy),
    ]
    if found:
        lines += ["Differences, paired by seed and question.", "", table2.padded(differences)]
    return "\n".join(lines)
