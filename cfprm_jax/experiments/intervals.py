"""How sure a difference between two treatments is, when both seeds and questions are samples.

The same questions are answered by the runs of every seed, so outcomes form a table of K seeds by Q questions, and both
would be others another time. The error of the table's mean is that of a crossed design with random seeds and random
questions,

    error^2 = var(means of seeds) / K + var(means of questions) / Q,

which counts the variance within the table twice and so errs on the wide side (Owen 2007, "The pigeonhole bootstrap",
shows this to be what resampling both would give). Its quantiles are Student's t with the degrees of freedom of
Satterthwaite (1946), (a + b)^2 / (a^2 / (K - 1) + b^2 / (Q - 1)) for the two terms a and b: where five seeds differ
much the interval is as wide as five numbers warrant. With one seed it is about questions alone.

A family of estimates made together has intervals at level 1 - 0.05 / size (Bonferroni), which hold all at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import special

Outcomes = Float[np.ndarray, "seeds questions"]
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, over seeds and questions.

    Attributes:
      mean: over the table.
      low, high: 95 % interval of this number alone.
      family_low, family_high: intervals that hold at once for the whole family, with probability 95 % or more.
      deviation: standard deviation of the seeds' means; NaN for one seed.
      error: standard error of the mean.
      p: two-sided p-value of "the mean is 0".
    """

    mean: float
    low: float
    high: float
    family_low: float
    family_high: float
    deviation: float
    error: float
    p: float

    def percent(self, sign: str = "") -> str:
        """In %, with the 95 % interval; sign="+" shows that of the mean."""
        return f"{100 * self.mean:{sign}.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def sign(self) -> int:
        """1 or -1 if the interval of the family excludes 0 on that side, else 0."""
        return int(self.family_low > 0) - int(self.family_high < 0)


def estimates(tables: Sequence[Outcomes]) -> list[Estimate]:
    """The means of tables that make up a family: outcomes, or differences that are paired by seed and question."""
    return [_estimate(np.asarray(table, np.float64), len(tables)) for table in tables]


def _estimate(table: Outcomes, family: int) -> Estimate:
    seeds, questions = table.shape
    of_seeds, of_questions = table.mean(axis=1), table.mean(axis=0)
    mean = float(table.mean())
    found = crossed(of_seeds, float(of_questions.var(ddof=1)) / questions if questions > 1 else 0.0, questions)
    alone, together = found.half(LEVEL), found.half(1 - (1 - LEVEL) / family)
    return Estimate(
        mean,
        mean - alone,
        mean + alone,
        mean - together,
        mean + together,
        deviation=float(of_seeds.std(ddof=1)) if seeds > 1 else float("nan"),
        error=found.error,
        p=found.p_value(mean),
    )


class CrossedError(NamedTuple):
    """The error of a mean over random seeds and random units.

    Attributes:
      error: standard error of the mean.
      freedom: degrees of freedom of its t distribution.
    """

    error: float
    freedom: float

    def half(self, level: float) -> float:
        """Half the width of the interval of a level, 0.95 for 95 %."""
        return float(special.stdtrit(self.freedom, 0.5 + level / 2)) * self.error

    def p_value(self, mean: float) -> float:
        """Two-sided p-value of "the mean is 0"."""
        if not self.error:
            return 1.0 if mean == 0 else 0.0
        return 2 * float(special.stdtr(self.freedom, -abs(mean) / self.error))


def crossed(by_seed: Float[np.ndarray, " seeds"], of_units: float, units: int) -> CrossedError:
    """The error of the mean over seeds, see the top of this module.

    Args:
      by_seed: the number of each seed.
      of_units: variance of the mean that the choice of units (questions, records) causes.
      units: how many there are.
    """
    seeds = len(by_seed)
    of_seeds = float(np.var(by_seed, ddof=1)) / seeds if seeds > 1 else 0.0
    rest = sum(x * x / (n - 1) for x, n in ((of_seeds, seeds), (of_units, units)) if x and n > 1)
    total = of_seeds + of_units
    return CrossedError(math.sqrt(total), total * total / rest if rest else 1.0)
