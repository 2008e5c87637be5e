"""All options of a Best-of-N evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cfprm_jax.config import AGGREGATIONS, LARGEST_SEED, MOST_CANDIDATES, MOST_COUNT, Options, option, whole_number
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import GRADERS


@dataclasses.dataclass(frozen=True)
class BonConfig(Options):
    """Best-of-N accuracies of scored candidates.

    python -m cfprm_jax.bon --input=SCORED.jsonl --output_dir=DIRECTORY

    Writes results.json, table.md, table.tex, plot.png, report.html (open it in a browser: it needs nothing else) and
    the resolved flags into --output_dir, and prints the table. With --input2 two systems are compared question by
    question.
    """

    input: tuple[str, ...] = option(
        (),
        'Scored candidates: files or globs, comma-separated. Rows name their data set ("dataset"); where they do not '
        "and several are given, each is a data set of its own, named as the file is.",
        kind="list",
    )
    input2: tuple[str, ...] = option(
        (), "The same questions scored by a second system, which the first one is compared with.", kind="list"
    )
    n: tuple[str, ...] = option(("8", "16", "32", "64"), "Numbers of candidates to choose from.", kind="list")
    aggregation: tuple[str, ...] = option(
        ("min", "last", "product", "mean"),
        "How the step scores of a candidate become one number. Where there is room for one only, it is the first.",
        choices=AGGREGATIONS,
        kind="list",
    )
    grader: str = option(
        "math_verify",
        "Who says what is right: math_verify compares answers as mathematics, prm800k by the strict rules that PRM800K "
        'was graded with, exact as texts without mere notation, and none takes the candidates\' own "correct".',
        choices=GRADERS,
    )
    grade_seconds: float = option(
        5.0,
        "Processor seconds for two answers; a comparison that takes longer is stopped and counted.",
        lower=0.1,
        upper=3600.0,
    )
    grade_processes: int = option(0, "Processes that compare answers; 0 is one a processor.", lower=0, upper=256)
    draws: int = option(
        0, "Random subsets of n candidates to average over; 0 takes the first n in file order.", lower=0, upper=100_000
    )
    resamples: int = option(10000, "Resamples of the bootstrap behind the intervals.", lower=100, upper=10**6)
    seed: int = option(0, "Seed of the draws and of the bootstrap.", lower=0, upper=LARGEST_SEED)
    name: str = option("PRM", "What tables call the system of --input.")
    name2: str = option("second PRM", "What tables call the system of --input2.")
    policy: str = option("", "The model that sampled the candidates, for the first column of table.tex.")
    report_questions: int = option(
        1000, "Most questions whose candidates report.html holds.", lower=0, upper=MOST_COUNT
    )
    output_dir: str = option("", "Directory of the results; one that holds something else is refused.")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_sizes(self.n, "--n")
        _check_list(self.aggregation, "--aggregation")
        if self.name == self.name2:
            raise UserError(f"--name and --name2 are both {self.name!r}: two systems need two names")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of candidates."""
        return parse_sizes(self.n, "--n")


def parse_sizes(texts: Sequence[str], flag: str) -> tuple[int, ...]:
    """The numbers of candidates that a flag names. UserError if there are none, or one that is no positive number."""
    _check_list(texts, flag)
    return tuple(whole_number(text, flag, 1, MOST_CANDIDATES) for text in texts)


def _check_list(texts: Sequence[str], flag: str) -> None:
    if not texts:
        raise UserError(f"{flag} is empty")
    if len(set(texts)) < len(texts):
        raise UserError(f"{flag}={','.join(texts)} names something twice")
