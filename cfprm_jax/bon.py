"""python -m cfprm_jax.bon: Best-of-N accuracies of scored candidates, beside votes, pass@1 and the oracle."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cfprm_jax import flags
from cfprm_jax.config import AGGREGATIONS, LARGEST_SEED, MOST_CANDIDATES, MOST_COUNT, Options, option, whole_number
from cfprm_jax.data.candidates import Question, read_candidates
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import best_of_n, breakdown, diagnostics
from cfprm_jax.evaluation.pool import make_pool
from cfprm_jax.grading.grader import GRADERS, Grader
from cfprm_jax.report import page, plot, results
from cfprm_jax.runtime import output_paths
from cfprm_jax.runtime.progress import ProgressLine

# More processes than this wait for the one that reads.
_MOST_PROCESSES = 16


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


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """What bon finds.

    Attributes:
      outcome: the object of results.json.
      page: what report.html holds of the candidates.
    """

    outcome: dict[str, Any]
    page: page.Data

    @property
    def summary(self) -> str:
        """The main table with its caption."""
        return results.summary(self.outcome)


def parse_sizes(texts: Sequence[str], flag: str) -> tuple[int, ...]:
    """The numbers of candidates that a flag names. UserError if there are none, or one that is no positive number."""
    _check_list(texts, flag)
    return tuple(whole_number(text, flag, 1, MOST_CANDIDATES) for text in texts)


def _check_list(texts: Sequence[str], flag: str) -> None:
    if not texts:
        raise UserError(f"{flag} is empty")
    if len(set(texts)) < len(texts):
        raise UserError(f"{flag}={','.join(texts)} names something twice")


def evaluate(questions: Iterable[Question], config: BonConfig, questions2: Iterable[Question] | None = None) -> Result:
    """All that the command finds, for scored candidates from a file or from memory.

    Args:
      questions2: the same questions scored by a second system.

    Raises:
      UserError: a question has fewer candidates than the largest n, a candidate was never scored, the grader has
        nothing to go by, or the two systems have different questions.
    """
    collector, steps = page.Collector(config.report_questions), diagnostics.Collector()
    with Grader(config.grader, config.grade_seconds, config.grade_processes or _processors()) as grader:
        pool = make_pool(collector.watch(grader.judge(_collected(questions, steps))), config.aggregation)
        best_of_n.check_sizes(pool, config.sizes)
        grading = grader.report()
        second = None if questions2 is None else make_pool(grader.judge(questions2), config.aggregation)
    parts, members = breakdown.parts(pool)
    found = best_of_n.outcomes(pool, config.sizes, config.draws, config.seed, members)
    measured = [found]
    comparison: list[breakdown.Difference] = []
    if second is not None:
        second = breakdown.aligned(pool, second)
        measured.append(best_of_n.outcomes(second, config.sizes, config.draws, config.seed, members))
        comparison = breakdown.compare(found, measured[1], config.resamples, config.seed)
    rows = [
        results.PartRows(
            part,
            int(members[number].sum()),
            *(best_of_n.rows(each, members, number, config.resamples, config.seed) for each in measured),
        )
        for number, part in enumerate(parts)
    ]
    outcome = results.results(
        {**flags.as_dict(config), "n": list(config.sizes)},
        (config.name, config.name2)[: len(measured)],
        pool,
        rows,
        grading,
        breakdown.correlations(pool, config.sizes),
        comparison,
        steps.result(),
    )
    return Result(outcome, collector.data(pool, max(config.sizes)))


def _collected(questions: Iterable[Question], collector: diagnostics.Collector) -> Iterator[Question]:
    """The same questions; the scores of their candidates are collected as they pass by."""
    for question in questions:
        for candidate in question.candidates:
            # Logits tell apart what scores, which round to 1, do not.
            scores = candidate.step_scores if candidate.step_logits is None else candidate.step_logits
            collector.add(scores, candidate.steps)
        yield question


def _processors() -> int:
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST_PROCESSES
    )


def write(result: Result, directory: str | pathlib.Path) -> None:
    """Write everything but the picture, which takes longer than all else, into a directory that exists."""
    results.write(result.outcome, directory)
    page.write(result.outcome, result.page, pathlib.Path(directory) / results.PAGE)


def read(inputs: Sequence[str]) -> Iterator[Question]:
    """The questions of --input or --input2. Where there are several, rows without a data set get their file's name.

    Raises:
      UserError: what read_candidates raises, or a question of one data set that occurs in two inputs.
    """
    seen: dict[tuple[str | None, str | int], str] = {}
    for name in inputs:
        for question in read_candidates(name):
            if len(inputs) > 1 and question.dataset is None:
                question = dataclasses.replace(question, dataset=pathlib.Path(name).name.partition(".json")[0])
            key = (question.dataset, question.id)
            if key in seen:
                raise UserError(f'{question.source}: "id" {question.id!r} was already that of {seen[key]}')
            seen[key] = question.source
            yield question


def main(config: BonConfig) -> int:
    """The command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    directory = pathlib.Path(config.output_dir)
    _refuse_other_content(directory)
    print(f"candidates  {', '.join(config.input)}", flush=True)
    if config.input2:
        print(f"compared    with {', '.join(config.input2)}", flush=True)
    print(
        f"choosing    n = {', '.join(config.n)} by {', '.join(config.aggregation)}; "
        f"{f'{config.draws} draws' if config.draws else 'the first n'}, grader {config.grader}",
        flush=True,
    )
    progress = ProgressLine("grading")
    second = _watched(read(config.input2), progress) if config.input2 else None
    result = evaluate(_watched(read(config.input), progress), config, second)
    progress.clear()
    flags.write_config(config, directory)
    write(result, directory)
    plot.write(result.outcome, directory / results.PLOT)
    print(
        f"\n{result.summary}\n"
        f"results     {directory / results.RESULTS}, {results.TABLE}, {results.LATEX}, {results.PLOT}"
    )
    print(f"report      {directory / results.PAGE}")
    return 0


def _watched(questions: Iterable[Question], progress: ProgressLine) -> Iterator[Question]:
    """The same questions; shows how many are graded."""
    for number, question in enumerate(questions):
        progress.show(functools.partial(_graded, number, progress))
        yield question


def _graded(number: int, progress: ProgressLine) -> str:
    return f"{number:,} questions, {number / progress.elapsed:,.1f} questions/s"


def _refuse_other_content(directory: pathlib.Path) -> None:
    """UserError if the directory holds files but no results of this command, whose config.json could be another's."""
    output_paths.require_directory(f"--output_dir={directory}", directory)
    if not directory.exists():
        return
    names = {path.name for path in directory.iterdir()}
    if not names:
        return
    try:
        ours = "rows" in json.loads((directory / results.RESULTS).read_text())
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise UserError(f"--output_dir={directory} holds something else ({sorted(names)[0]}, ...): name another one")


if __name__ == "__main__":
    sys.exit(flags.run(BonConfig, main))
