"""What an experiment writes: Table 2, the controls, the figure, the findings, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cfprm_jax.experiments import figure, findings, table2
from cfprm_jax.experiments.cell import TestSet
from cfprm_jax.experiments.contrasts import ContrastFamily, Results, families, row_title, title
from cfprm_jax.experiments.grid import ORM, TREATMENTS
from cfprm_jax.experiments.intervals import estimates
from cfprm_jax.experiments.runner import CellResult
from cfprm_jax.runtime import atomic

FILES = ("findings.md", "table2.md", "table2.tex", "controls.md", "figure.png", "results.json")


def write(
    directory: pathlib.Path,
    done: Sequence[CellResult],
    tests: dict[str, list[TestSet]],
    subsets: str,
    config: dict[str, Any],
) -> str:
    """Write FILES into the directory of the experiment.

    Args:
      tests: the test sets of each level.
      subsets: how candidates are chosen from, see cell.SUBSETS.
      config: the command's options.

    Returns:
      The findings in Markdown.
    """
    results = Results(done, subsets)
    found = families(results)
    outcome = _json(results, found, tests, config)
    # First, as it has what all other files are made of.
    atomic.write_json(directory / "results.json", outcome, indent=1)
    document = findings.document(results.seeds, results.n, outcome["tests"], found)
    atomic.write_text(directory / "findings.md", document)
    atomic.write_text(directory / "table2.md", table2.markdown(results, found))
    atomic.write_text(directory / "table2.tex", table2.latex(results, found))
    atomic.write_text(directory / "controls.md", controls(results, found))
    figure.write(results, directory / "figure.png")
    return document


def controls(results: Results, found: Sequence[ContrastFamily]) -> str:
    """Accuracies of all treatments, and every family of differences, in Markdown."""
    parts = ["# Treatments", "", _treatments(results)]
    for family in found:
        parts += [f"# {family.question}", "", _differences(family)]
    return "\n".join(parts)


def _treatments(results: Results) -> str:
    grid = [["redundancy", "model", "trained on", "steps", "tokens", *results.tests]]
    for level in results.levels:
        for row in results.rows:
            for treatment in TREATMENTS:
                if not results.has(level, row, treatment):
                    continue
                means = estimates([results.mean(level, row, treatment, test) for test in results.tests])
                name = "whole solutions" if row == ORM and treatment == "plain" else title(treatment)
                grid.append(
                    [
                        level,
                        row_title(row),
                        "whole, then C=2, then 1" if row == ORM and treatment == "c2" else name,
                        f"{results.steps(level, row, treatment):,.0f}",
                        f"{results.tokens(level, row, treatment):,.0f}",
                        *(table2.with_deviation(100 * e.mean, 100 * e.deviation) for e in means),
                    ]
                )
    note = "Best-of-N accuracy in %, the mean over n, ± standard deviation over seeds. Tokens: computed in training.\n"
    return table2.padded(grid) + "\n" + note


def _differences(family: ContrastFamily) -> str:
    grid = [["redundancy", "model", "test set", "difference", "own 95 % interval", "interval of the family", "p"]]
    for d in family.differences:
        e = d.estimate
        grid.append(
            [
                d.level,
                row_title(d.row) + (f", {title(d.treatment)}" if family.key == "sweep" else ""),
                d.test,
                f"{100 * e.mean:+.2f}",
                f"[{100 * e.low:.2f}, {100 * e.high:.2f}]",
                f"[{100 * e.family_low:.2f}, {100 * e.family_high:.2f}]",
                f"{e.p:.2g}",
            ]
        )
    e = family.pooled
    own = f"[{100 * e.low:.2f}, {100 * e.high:.2f}]"
    grid.append(["", "mean of all", "", f"{100 * e.mean:+.2f}", own, "", f"{e.p:.2g}"])
    return table2.padded(grid)


def _json(
    results: Results, found: Sequence[ContrastFamily], tests: dict[str, list[TestSet]], config: dict[str, Any]
) -> dict[str, Any]:
    accuracies = []
    for level in results.levels:
        for row in results.rows:
            for treatment in TREATMENTS:
                if results.has(level, row, treatment):
                    for test in results.tests:
                        right = results.right(level, row, treatment, test)
                        accuracies.append(
                            {
                                "level": level,
                                "row": row,
                                "treatment": treatment,
                                "test": test,
                                "steps": results.steps(level, row, treatment),
                                "tokens": results.tokens(level, row, treatment),
                                "accuracy": {
                                    str(n): right[:, :, place].mean(axis=1).tolist()
                                    for place, n in enumerate(results.n)
                                },
                            }
                        )
    return {
        "config": config,
        "seeds": list(results.seeds),
        "n": list(results.n),
        "tests": {
            level: {
                test.name: {
                    "questions": len(test.correct),
                    "candidates": test.correct.shape[1],
                    "pass_at_1": float(test.correct.mean()),
                    "majority": {str(n): float(test.majority(n).mean()) for n in results.n},
                    "oracle": {str(n): float(np.mean(test.correct[:, :n].any(axis=1))) for n in results.n},
                }
                for test in tests[level]
            }
            for level in results.levels
        },
        "accuracies": accuracies,
        "families": [dataclasses.asdict(family) for family in found],
    }
