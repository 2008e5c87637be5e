"""python -m cfprm_jax.bon: Best-of-N accuracies of scored candidates, beside votes, pass@1 and the oracle."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from cfprm_jax import flags
from cfprm_jax.config import AGGREGATIONS, option
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import best_of_n, report
from cfprm_jax.evaluation.answers import GRADERS
from cfprm_jax.evaluation.candidates import Question, read_candidates


@dataclasses.dataclass(frozen=True)
class BonConfig:
    """Best-of-N accuracies of scored candidates.

    python -m cfprm_jax.bon --input=SCORED.jsonl --output_dir=DIRECTORY

    Writes results.json, table.md and the resolved flags into --output_dir, and prints the table.
    """

    input: tuple[str, ...] = option((), "Scored candidates: files or globs, comma-separated.", kind="list")
    n: tuple[str, ...] = option(("8", "16", "32", "64"), "Numbers of candidates to choose from.", kind="list")
    aggregation: tuple[str, ...] = option(
        ("min", "last", "product", "mean"),
        "How the step scores of a candidate become one number.",
        choices=AGGREGATIONS,
        kind="list",
    )
    grader: str = option(
        "none",
        'Who says what is right: none takes the candidates\' own "correct", exact compares answers after removing mere '
        "notation.",
        choices=GRADERS,
    )
    draws: int = option(
        0, "Random subsets of n candidates to average over; 0 takes the first n in file order.", lower=0
    )
    resamples: int = option(10000, "Resamples of the bootstrap behind the intervals.", lower=100)
    seed: int = option(0, "Seed of the draws and of the bootstrap.", lower=0)
    output_dir: str = option("", "Directory of the results; one that holds something else is refused.")

    def __post_init__(self) -> None:
        parse_sizes(self.n, "--n")
        _check_list(self.aggregation, "--aggregation")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of candidates."""
        return parse_sizes(self.n, "--n")


def parse_sizes(texts: Sequence[str], flag: str) -> tuple[int, ...]:
    """The numbers of candidates that a flag names. UserError if there are none, or one that is no positive number."""
    _check_list(texts, flag)
    for text in texts:
        if not (text.isascii() and text.isdigit() and int(text) >= 1):
            raise UserError(f"{flag}: {text!r} is not a positive whole number")
    return tuple(int(text) for text in texts)


def _check_list(texts: Sequence[str], flag: str) -> None:
    if not texts:
        raise UserError(f"{flag} is empty")
    if len(set(texts)) < len(texts):
        raise UserError(f"{flag}={','.join(texts)} names something twice")


def evaluate(questions: Iterable[Question], config: BonConfig) -> tuple[dict[str, Any], str]:
    """The object of results.json and the table with its caption, for scored candidates from a file or from memory.

    Raises:
      UserError: a question has fewer candidates than the largest n, a candidate was never scored, or the grader has
        nothing to go by.
    """
    pool = best_of_n.make_pool(questions, config.aggregation, config.grader)
    rows = best_of_n.evaluate(pool, config.sizes, config.draws, config.seed, config.resamples)
    outcome = report.results({**flags.as_dict(config), "n": list(config.sizes)}, pool, rows)
    return outcome, f"{report.table(rows)}\n{report.caption(outcome)}\n"


def main(config: BonConfig) -> int:
    """The command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    directory = pathlib.Path(config.output_dir)
    _refuse_other_content(directory)
    print(f"candidates  {', '.join(config.input)}", flush=True)
    print(
        f"choosing    n = {', '.join(config.n)} by {', '.join(config.aggregation)}; "
        f"{f'{config.draws} draws' if config.draws else 'the first n'}, grader {config.grader}",
        flush=True,
    )
    outcome, text = evaluate(read_candidates(config.input), config)
    flags.write_config(config, directory)
    report.write(outcome, text, directory)
    print(f"\n{text}\nresults     {directory / 'results.json'}\ntable       {directory / 'table.md'}")
    return 0


def _refuse_other_content(directory: pathlib.Path) -> None:
    """UserError if the directory holds files but no results of this command, whose config.json could be another's."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"--output_dir={directory} is a file")
    names = {path.name for path in directory.iterdir()}
    if not names:
        return
    try:
        ours = "rows" in json.loads((directory / "results.json").read_text())
    except (OSError, ValueError):
        ours = False
    if not ours:
        raise UserError(f"--output_dir={directory} holds something else ({sorted(names)[0]}, ...): name another one")


if __name__ == "__main__":
    sys.exit(flags.run(BonConfig, main))
