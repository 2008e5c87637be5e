"""python -m cfprm_jax.bon: Best-of-N accuracies of scored candidates, beside votes, pass@1 and the oracle."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import functools
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator

from cfprm_jax import flags
from cfprm_jax.data.candidates import Question
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.report import best_of_n, plot, results
from cfprm_jax.runtime import config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine


def main(config: BonConfig) -> int:
    """Runs the command."""
    if not config.input or not config.output_dir:
        raise UserError(f"--{'output_dir' if config.input else 'input'} is empty")
    directory = pathlib.Path(config.output_dir)
    _refuse_other_content(directory)
    print(f"candidates  {', '.join(config.input)}", flush=True)
    if config.input2:
        print(f"compared    with {', '.join(config.input2)}", flush=True)
    print(
        f"best of n   n = {', '.join(config.n)}, aggregation {', '.join(config.aggregation)}, "
        f"{f'{config.draws} draws' if config.draws else 'the first n'}, grader {config.grader}",
        flush=True,
    )
    progress = ProgressLine("grading")
    second = _watched(best_of_n.read(config.input2), progress) if config.input2 else None
    result = best_of_n.evaluate(_watched(best_of_n.read(config.input), progress), config, second)
    progress.clear()
    config_files.write_config(config, directory)
    best_of_n.write(result, directory)
    plot.write(result.outcome, directory / results.PLOT)
    print(
        f"\n{result.summary}\n"
        f"results     {directory / results.RESULTS}, {results.TABLE}, {results.LATEX}, {results.PLOT}"
    )
    print(f"report      {directory / results.PAGE}")
    return 0


def _watched(questions: Iterable[Question], progress: ProgressLine) -> Iterator[Question]:
    """The same questions, with a progress line of how many are graded."""
    for number, question in enumerate(questions):
        progress.show(functools.partial(_graded, number, progress))
        yield question


def _graded(number: int, progress: ProgressLine) -> str:
    return f"{number:,} questions, {number / progress.elapsed:,.1f} questions/s"


def _refuse_other_content(directory: pathlib.Path) -> None:
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


if __name__ == "__main__":
    sys.exit(flags.run(BonConfig, main))
