"""Findings of an experiment as one page of plain text, generated from the numbers.

The words follow from intervals, by rules that are the same whichever way the results fall. A difference counts as
shown only where the interval that holds for its whole family excludes 0; intervals of single differences are reported,
and so is how many of those would exclude 0 by chance.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from cfprm_jax.experiments.contrasts import Contrast, ContrastFamily, Results, row_title, title
from cfprm_jax.experiments.intervals import Estimate


def page(results: Results, families: Sequence[ContrastFamily], materials: Sequence[str]) -> str:
    """The text.

    Args:
      materials: lines that describe the data.
    """
    total = sum(len(family.differences) for family in families)
    paragraphs = [
        f"What {len(results)} runs with {len(results.seeds)} seed{'s' * (len(results.seeds) > 1)} support",
        "Differences are in points of Best-of-N accuracy, averaged over n = "
        f"{', '.join(map(str, results.n))}, paired by seed and question. Square brackets hold 95 % intervals for other "
        'seeds and other questions, of one number by itself. "Shown" is said only of a difference whose interval still '
        f"excludes 0 when all differences of its question hold at once (Bonferroni). There are {total} differences in "
        f"{len(families)} families here, so that of the intervals by themselves about {0.05 * total:.0f} would "
        "exclude 0 if nothing mattered."
        + (" With one seed the intervals are about questions alone." if len(results.seeds) == 1 else ""),
        *materials,
        *(_family(family) for family in families),
    ]
    return "\n\n".join("\n".join(textwrap.wrap(paragraph, 100)) for paragraph in paragraphs) + "\n"


def _family(family: ContrastFamily) -> str:
    count = len(family.differences)
    shown = [d for d in family.differences if d.estimate.sign]
    alone = [d for d in family.differences if d.estimate.low > 0 or d.estimate.high < 0]
    above = sum(d.estimate.mean > 0 for d in family.differences)
    parts = [family.question]
    if family.pooled is not None:
        parts.append(f"On average over losses and test sets {_points(family.pooled)}: {verdict(family)}.")
    parts.append(f"{above} of {count} differences are above 0, from {_extremes(family.differences)}.")
    if shown:
        parts.append("Shown: " + ", ".join(map(_named, shown)) + ".")
    else:
        parts.append("No single one is shown.")
    unsure = [d for d in alone if d not in shown]
    if unsure:
        parts.append("Only by its own interval: " + ", ".join(map(_named, unsure)) + ".")
    parts.append(f"Median half-width of the intervals: {_precision(family.differences):.1f} points.")
    return " ".join(parts)


def verdict(family: ContrastFamily) -> str:
    """The conclusion of the pooled difference on the family's claim."""
    pooled = family.pooled
    if pooled is None:
        return "differences of several kinds are not averaged"
    if pooled.low > 0:
        return f"it supports that {family.better}"
    if pooled.high < 0:
        return f'it speaks against it: the opposite of "{family.better}" holds'
    return (
        f"it does not support that {family.better}, nor the opposite; effects above {100 * pooled.high:.1f} and below "
        f"{100 * pooled.low:.1f} points are unlikely"
    )


def _extremes(differences: Sequence[Contrast]) -> str:
    means = [100 * d.estimate.mean for d in differences]
    return f"{min(means):+.1f} to {max(means):+.1f}"


def _precision(differences: Sequence[Contrast]) -> float:
    return float(np.median([50 * (d.estimate.high - d.estimate.low) for d in differences]))


def _points(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:+.2f} [{100 * estimate.low:.2f}, {100 * estimate.high:.2f}]"


def _named(difference: Contrast) -> str:
    what = f"{row_title(difference.row)} on {difference.test}"
    if difference.treatment in ("c3", "c4"):
        what += f" ({title(difference.treatment)})"
    return f"{what} {_points(difference.estimate)}"
