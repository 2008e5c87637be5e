"""A Best-of-N evaluation from scored candidates to results.json and report.html."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cfprm_jax.data.candidates import Question, read_candidates_by_bytes
from cfprm_jax.data.formats.files import expand, require
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import best_of_n, breakdown, diagnostics, equal_cost
from cfprm_jax.evaluation.options import USUAL_SIZES, BonConfig, fitting_sizes
from cfprm_jax.evaluation.pool import make_pool
from cfprm_jax.grading.grader import Grader
from cfprm_jax.grading.worker import RULES
from cfprm_jax.options import refuse_unused
from cfprm_jax.report import page, plot, results
from cfprm_jax.runtime import config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine

# More processes than this wait for the one that reads.
_MOST_PROCESSES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class BestOfNResult:
    """What bon finds.

    Attributes:
      outcome: the object of results.json.
      page: what report.html holds of the candidates.
    """

    outcome: dict[str, Any]
    page: page.PageData

    @property
    def summary(self) -> str:
        """The main table with its caption."""
        return results.summary(self.outcome)


def run(config: BonConfig, log: Callable[[str], None]) -> BestOfNResult:
    """Grades and evaluates config.input, and writes config.output_dir.

    Args:
      log: receives lines about the input and the options.

    Raises:
      UserError: invalid options or input.
    """
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    _refuse_unused(config)
    directory = pathlib.Path(config.output_dir)
    _check_directory(directory)
    require(input=config.input, input2=config.input2)
    log(f"candidates  {', '.join(config.input)}")
    if config.input2:
        log(f"compared    with {', '.join(config.input2)}")
    options = (
        f"aggregation {', '.join(config.aggregation)}, "
        f"{f'{config.draws} draws' if config.draws else 'the first n'}, grader {config.grader}"
    )
    if config.sizes:
        log(f"best of n   n = {', '.join(map(str, config.sizes))}; {options}")
    progress = ProgressLine("grading")
    sizes = [file.size for inputs in (config.input, config.input2) if inputs for file in expand(inputs)]
    graded = GradingProgress(progress, sum(sizes))
    second = graded.watched(config.input2) if config.input2 else None
    result = evaluate(graded.watched(config.input), config, second)
    progress.clear()
    if not config.sizes:
        log(f"best of n   n = {_fitted(result.outcome)}; {options}")
    config_files.write_config(config, directory)
    write(result, directory)
    plot.write(result.outcome, directory / results.PLOT)
    return result


def _fitted(outcome: Mapping[str, Any]) -> str:
    """The n that --n=auto came to, which only the candidates determine."""
    sizes = outcome["config"]["n"]
    text = ", ".join(map(str, sizes))
    if set(sizes) <= set(USUAL_SIZES):
        return text
    return f"{text}, {'all of the candidates' if [outcome['pool']] == sizes else 'the fewest candidates of a question'}"


def evaluate(
    questions: Iterable[Question], config: BonConfig, questions2: Iterable[Question] | None = None
) -> BestOfNResult:
    """All that the command finds, for scored candidates from a file or from memory.

    Args:
      questions2: the same questions scored by a second system.

    Raises:
      UserError: a question has fewer candidates than the largest n, a candidate was never scored, the grader has
        no reference answer, or the two systems have different questions.
    """
    collector, steps = page.PageCollector(config.report_questions), diagnostics.Collector()
    with Grader(config.grader, config.grade_seconds, config.grade_processes or _processors()) as grader:
        pool = make_pool(collector.watch(grader.judge(_collected(questions, steps))), config.aggregation)
        if config.sizes:
            best_of_n.check_sizes(pool, config.sizes)
        grading = grader.report()
        second = None if questions2 is None else make_pool(grader.judge(questions2), config.aggregation)
    smallest = min(int(each.sizes.min()) for each in (pool, second) if each is not None)
    sizes = config.sizes or fitting_sizes(smallest)
    parts, members = breakdown.parts(pool)
    found = best_of_n.outcomes(pool, sizes, config.draws, config.seed, members)
    measured = [found]
    comparison: list[breakdown.AccuracyDifference] = []
    at_cost: list[equal_cost.EqualCost] = []
    if second is not None:
        costs = pool.has_costs and second.has_costs
        second = breakdown.aligned(pool, second, equal_sizes=not costs)
        if costs:
            parameters = (1e9 * config.policy_parameters, 1e9 * config.reward_parameters)
            at_cost = equal_cost.compare(pool, second, parameters, config.resamples, config.seed)
        measured.append(best_of_n.outcomes(second, sizes, config.draws, config.seed, members))
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
        {**config_files.as_dict(config), "n": list(sizes)},
        (config.name, config.name2)[: len(measured)],
        pool,
        rows,
        grading=grading,
        correlations=breakdown.correlations(pool, sizes),
        comparison=comparison,
        diagnosed=steps.result(),
        at_cost=at_cost,
        left_out=() if config.sizes else [n for n in USUAL_SIZES if n not in sizes],
    )
    return BestOfNResult(outcome, collector.data(pool, max(sizes)))


def _refuse_unused(config: BonConfig) -> None:
    """UserError for an option that is set and has no effect beside the others."""
    if not config.input2:
        refuse_unused(config, ["name2", "policy_parameters", "reward_parameters"], "comparisons with --input2")
    if config.grader not in RULES:
        names = ["grade_seconds", "grade_processes"]
        refuse_unused(config, names, f"--grader={' and '.join(RULES)}, not {config.grader}")


def _collected(questions: Iterable[Question], collector: diagnostics.Collector) -> Iterator[Question]:
    """The same questions; the scores of their candidates are collected as they pass by."""
    for question in questions:
        for candidate in question.candidates:
            # Logits differ where scores round to 1.
            scores = candidate.step_scores if candidate.step_logits is None else candidate.step_logits
            collector.add(scores, candidate.steps)
        yield question


def _processors() -> int:
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MOST_PROCESSES
    )


def write(result: BestOfNResult, directory: str | pathlib.Path) -> None:
    """Write everything but the picture, which takes longer than all else, into a directory that exists."""
    results.write(result.outcome, directory)
    page.write(result.outcome, result.page, pathlib.Path(directory) / results.PAGE)


def read(inputs: Sequence[str], seen: Callable[[float], object] = lambda _: None) -> Iterator[Question]:
    """The questions of --input or --input2, a file or pattern each. Of several, rows without a data set get its name.

    Args:
      seen: called before each question with the bytes of the inputs up to its end.

    Raises:
      UserError: what read_candidates raises, or a question of one data set that occurs in two inputs.
    """
    known: dict[tuple[str | None, str | int], str] = {}
    before = 0.0
    for name in inputs:
        for question, size in read_candidates_by_bytes(name):
            seen(before + size)
            if len(inputs) > 1 and question.dataset is None:
                question = dataclasses.replace(question, dataset=pathlib.Path(name).name.partition(".json")[0])
            key = (question.dataset, question.id)
            if key in known:
                raise UserError(f'{question.source}: "id" {question.id!r} was already that of {known[key]}')
            known[key] = question.source
            yield question
        before += sum(file.size for file in expand(name))


class GradingProgress:
    """The progress line of a grading: questions, and the share of the input that they are."""

    def __init__(self, line: ProgressLine, size: int) -> None:
        """Takes the size of all inputs in bytes."""
        self._line, self._size = line, size
        self._questions, self._bytes = 0, 0.0

    def watched(self, inputs: Sequence[str]) -> Iterator[Question]:
        """The questions of inputs, one after the other, with the line."""
        before, ends = self._bytes, [0.0]
        for question in read(inputs, ends.append):
            self._line.show(self._text, min(self._bytes / max(self._size, 1), 1.0))
            self._questions += 1
            self._bytes = before + ends[-1]
            ends.clear()
            yield question

    def _text(self) -> str:
        return f"{self._questions:,} questions, {self._questions / self._line.elapsed:,.1f} questions/s"


def _check_directory(directory: pathlib.Path) -> None:
    """UserError if the directory contains files but no results of this command; its config.json could be another's."""
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
        raise UserError(
            f"--output_dir={directory} contains other files ({sorted(names)[0]}, ...): choose another directory"
        )
