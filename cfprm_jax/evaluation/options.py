"""All options of a Best-of-N evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from cfprm_jax.config import AGGREGATIONS, LARGEST_SEED, MOST_CANDIDATES, MOST_COUNT
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import GRADERS
from cfprm_jax.options import Options, option, whole_number

_AUTO = ("auto",)
USUAL_SIZES = (8, 16, 32, 64)
"""The n of --n=auto, of which those are used that every question has."""


@dataclasses.dataclass(frozen=True)
class BonConfig(Options):
    """Compute Best-of-N accuracies of scored candidates.

    python -m cfprm_jax.bon --input=SCORED.jsonl --output_dir=DIRECTORY

    Writes results.json, table.md, table.tex, plot.png, report.html (a self-contained page) and the resolved flags into
    --output_dir, and prints the table. --input2 adds a paired comparison of two systems.
    """

    MAIN_FLAGS: ClassVar = (
        *("input", "output_dir", "n", "aggregation", "grader"),
        *("draws", "seed", "input2", "name", "report_questions"),
    )

    input: tuple[str, ...] = option(
        (),
        'Scored candidates: files or globs, comma-separated. The data set of a row is its "dataset". Where that is '
        "missing, each of several files is a data set, and so is each glob, whose files are parts of one.",
        kind="list",
    )
    input2: tuple[str, ...] = option(
        (), "The same questions scored by a second system, for a paired comparison.", kind="list"
    )
    n: tuple[str, ...] = option(
        _AUTO,
        "Values of n: numbers of candidates. auto: those of 8, 16, 32 and 64 that every question has, or all "
        "candidates where there are fewer.",
        kind="list",
    )
    aggregation: tuple[str, ...] = option(
        ("min", "last", "product", "mean"),
        "Aggregations of the step scores of a candidate. The first is used where only one is shown.",
        choices=AGGREGATIONS,
        kind="list",
    )
    grader: str = option(
        "math_verify",
        "Comparison of final answers. math_verify: as mathematical expressions. prm800k: by the strict rules of "
        'PRM800K. exact: as texts in a normal form. none: uses "correct" of the candidates.',
        choices=GRADERS,
    )
    grade_seconds: float = option(
        5.0,
        "CPU time limit in seconds per comparison of two answers. Timeouts are counted.",
        lower=0.1,
        upper=3600.0,
    )
    grade_processes: int = option(
        0, "Number of processes that compare answers; 0 is one per CPU core.", lower=0, upper=256
    )
    draws: int = option(
        0,
        "Number of random subsets of n candidates to average; 0 uses the first n in file order.",
        lower=0,
        upper=10**5,
    )
    resamples: int = option(10000, "Bootstrap resamples of the confidence intervals.", lower=100, upper=10**6)
    seed: int = option(0, "Random seed of the draws and of the bootstrap.", lower=0, upper=LARGEST_SEED)
    name: str = option("PRM", "Name of the system of --input in tables.")
    name2: str = option("second PRM", "Name of the system of --input2 in tables.")
    policy_parameters: float = option(
        0.0,
        'Parameters of the policy in billions, for the comparison at equal cost of rows with "cost"; 0 is those of the '
        "rows.",
        lower=0.0,
        upper=1e6,
    )
    reward_parameters: float = option(
        0.0, "The same of the PRM; required if search used a server.", lower=0.0, upper=1e6
    )
    policy: str = option("", "Name of the policy that sampled the candidates, for the first column of table.tex.")
    report_questions: int = option(
        1000, "Maximum number of questions whose candidates are in report.html.", lower=0, upper=MOST_COUNT
    )
    output_dir: str = option("", "Directory of the results; must be new, empty, or contain results of bon.")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.n, "--n")
        _check_list(self.aggregation, "--aggregation")
        if self.name == self.name2:
            raise UserError(f"--name and --name2 are both {self.name!r}: expected different names")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The values of n; empty for auto."""
        return parse_sizes(self.n, "--n")


def parse_sizes(texts: Sequence[str], flag: str) -> tuple[int, ...]:
    """The values of n of a flag, none for auto. UserError if it is empty, or one is not a positive number."""
    _check_list(texts, flag)
    if tuple(texts) == _AUTO:
        return ()
    return tuple(whole_number(text, flag, 1, MOST_CANDIDATES) for text in texts)


def fitting_sizes(smallest: int) -> tuple[int, ...]:
    """The values of n for --n=auto.

    Args:
      smallest: candidates of the question that has the fewest, 1 or more.
    """
    return tuple(n for n in USUAL_SIZES if n <= smallest) or (smallest,)


def _check_list(texts: Sequence[str], flag: str) -> None:
    if not texts:
        raise UserError(f"{flag} is empty")
    if len(set(texts)) < len(texts):
        raise UserError(f"{flag}={','.join(texts)} contains an entry twice")
