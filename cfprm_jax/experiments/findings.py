"""The findings of a grid as tables: what candidates give without a reward model, and a conclusion for each question.

A grid without two treatments to compare, such as one cell, has no findings.

A conclusion is that of a family's pooled difference: "yes" or "no" if its 95 % interval excludes 0. Single differences
count as shown if the interval of their family excludes 0, in which all of them hold at once (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.experiments import table2
from cfprm_jax.experiments.contrasts import Contrast, ContrastFamily, row_title, title
from cfprm_jax.experiments.intervals import Estimate

NOTHING = "No findings: the grid has no two treatments to compare. controls.md has the accuracy of each cell."


def document(seeds: Sequence[int], n: Sequence[int], tests: Mapping[str, Any], found: Sequence[ContrastFamily]) -> str:
    """Both tables in Markdown; one line in place of the second where there is nothing to compare.

    Args:
      tests: level -> name of a test set -> its entry in results.json.
    """
    total = sum(len(family.differences) for family in found)
    note = (
        f"Differences in points of Best-of-N accuracy, averaged over n = {', '.join(map(str, n))}, paired by seed "
        f"({len(seeds)}) and question; 95 % intervals. Shown: of {total} differences, those whose Bonferroni interval "
        f"excludes 0; about {0.05 * total:.0f} of the intervals by themselves would exclude 0 by chance. controls.md "
        "has every difference."
    )
    if len(seeds) == 1:
        note += " With one seed the intervals are over questions only."
    parts = ["# Candidates", _candidates(tests, max(n))]
    parts += ["# Findings", _conclusions(found), note] if found else [NOTHING]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def conclusion(pooled: Estimate) -> str:
    """ "yes", "no" (the opposite), or "not shown"."""
    return "yes" if pooled.low > 0 else "no" if pooled.high < 0 else "not shown"


def _candidates(tests: Mapping[str, Any], most: int) -> str:
    grid = [["redundancy", "test set", "questions", "pass@1", f"majority vote, n = {most}", f"oracle, n = {most}"]]
    for level, sets in tests.items():
        for name, entry in sets.items():
            shares = (entry["pass_at_1"], entry["majority"][str(most)], entry["oracle"][str(most)])
            grid.append([level, name, f"{entry['questions']:,}", *(f"{100 * share:.1f} %" for share in shares)])
    return table2.padded(grid)


def _conclusions(found: Sequence[ContrastFamily]) -> str:
    grid = [["question", "hypothesis", "mean difference", "conclusion", "above 0", "shown"]]
    for family in found:
        shown = [_named(each) for each in family.differences if each.estimate.sign]
        above = sum(each.estimate.mean > 0 for each in family.differences)
        grid.append(
            [
                family.question,
                family.better,
                _points(family.pooled),
                conclusion(family.pooled),
                f"{above} of {len(family.differences)}",
                ", ".join(shown) or "none",
            ]
        )
    return table2.padded(grid)


def _points(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:+.2f} [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]"


def _named(difference: Contrast) -> str:
    treatment = f", {title(difference.treatment)}" if difference.treatment in ("c3", "c4") else ""
    return f"{row_title(difference.row)}{treatment} on {difference.test} {_points(difference.estimate)}"
