"""The embedded default: a small arithmetic world with exact step labels, made here, the same for the same seed.

    files = cfprm_jax.synthetic.materialise("runs/world", seed=0)

writes everything that training and Best-of-N read: a tokenizer and the configuration of a small Qwen2, labelled
solutions to train on and to evaluate on, and candidates of the held-out problems.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from cfprm_jax.runtime import atomic
from cfprm_jax.synthetic.solver import Bias, SimulatedSolution, sample_bias, solve
from cfprm_jax.synthetic.world import DAYS, Problem, WorldConfig, distinct_problems

__all__ = ["SyntheticFiles", "WorldConfig", "materialise", "materialise_model"]

_PROBLEMS, _TRAIN, _HELD_OUT, _CANDIDATES = range(4)


@dataclasses.dataclass(frozen=True)
class SyntheticFiles:
    """What was written.

    Attributes:
      model: Hugging Face directory with config.json and tokenizer, without weights.
      train: stepwise JSON lines, several solutions of each problem one after another.
      held_out: the same for other problems.
      candidates: a candidates file of the held-out problems.
    """

    model: pathlib.Path
    train: pathlib.Path
    held_out: pathlib.Path
    candidates: pathlib.Path


def materialise(directory: str | pathlib.Path, seed: int, config: WorldConfig | None = None) -> SyntheticFiles:
    """Write the world into a directory, which is made; files that it holds are written over.

    Training and held-out problems are disjoint, and all distinct.

    Raises:
      UserError: the configuration requires more distinct problems than there are.
    """
    config = config or WorldConfig()
    with atomic.updated_directory(directory) as scratch:
        _fill(_files(scratch), seed, config)
    return _files(pathlib.Path(directory))


def materialise_model(directory: str | pathlib.Path) -> pathlib.Path:
    """Write config.json and tokenizer of the world's network into a directory, which is returned.

    The tokenizer encodes any text, with a token for each byte outside the world's words.
    """
    with atomic.updated_directory(directory) as scratch:
        _write_model(scratch)
    return pathlib.Path(directory)


def _files(directory: pathlib.Path) -> SyntheticFiles:
    return SyntheticFiles(
        directory / "model", directory / "train.jsonl", directory / "held_out.jsonl", directory / "candidates.jsonl"
    )


def _fill(files: SyntheticFiles, seed: int, config: WorldConfig) -> None:
    files.model.mkdir()
    _write_model(files.model)
    rng, taken = np.random.default_rng((seed, _PROBLEMS)), set[Problem]()
    held_out = distinct_problems(config, config.held_out_problems, rng, taken)
    train = distinct_problems(config, config.train_problems, rng, taken)
    wild = dataclasses.replace(config, slip_rate=config.train_slip_rate)
    _write(files.train, _stepwise_rows(train, wild, seed, _TRAIN, "train"))
    _write(files.held_out, _stepwise_rows(held_out, wild, seed, _HELD_OUT, "held_out"))
    _write(files.candidates, _candidates_rows(held_out, config, seed))


def _write_model(directory: pathlib.Path) -> None:
    # transformers takes seconds to import, and only this needs it.
    from cfprm_jax.synthetic.model import make_config
    from cfprm_jax.synthetic.tokenizer import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    (directory / "config.json").write_text(json.dumps(make_config(len(tokenizer)), indent=2) + "\n")


def _write(path: pathlib.Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _bias(problem: Problem, config: WorldConfig, seed: int) -> Bias:
    """A problem's bias, the same for its candidates and its labelled solutions."""
    return sample_bias(problem, config, np.random.default_rng((seed, problem.start, *(m % 100 for m in problem.moves))))


def _stepwise_rows(
    problems: Iterable[Problem], config: WorldConfig, seed: int, part: int, name: str
) -> Iterable[dict[str, Any]]:
    for number, problem in enumerate(problems):
        rng = np.random.default_rng((seed, part, number))
        bias = _bias(problem, config, seed)
        for sample in range(config.solutions_per_problem):
            solution = solve(problem, bias, config, rng)
            if 0 in solution.labels and rng.random() < config.stop_rate:
                solution = until_first_mistake(solution)
            yield {
                "id": f"{name}_{number:05d}_{sample}",
                "prompt": problem.question,
                "completions": list(solution.texts),
                "labels": [bool(label) for label in solution.labels],
                "answer": DAYS[problem.answer],
            }


def until_first_mistake(solution: SimulatedSolution) -> SimulatedSolution:
    """The solution up to and with its first negative step."""
    end = solution.labels.index(0) + 1
    return dataclasses.replace(solution, steps=solution.steps[:end], labels=solution.labels[:end])


def _candidates_rows(problems: Iterable[Problem], config: WorldConfig, seed: int) -> Iterable[dict[str, Any]]:
    for number, problem in enumerate(problems):
        rng = np.random.default_rng((seed, _CANDIDATES, number))
        bias = _bias(problem, config, seed)
        solutions = [solve(problem, bias, config, rng) for _ in range(config.candidates_per_problem)]
        yield {
            "id": f"held_out_{number:05d}",
            "dataset": "synthetic",
            "question": problem.question,
            "answer": DAYS[problem.answer],
            "candidates": [
                {
                    "steps": list(solution.texts),
                    "predicted": DAYS[solution.answer],
                    "correct": solution.answer == problem.answer,
                }
                for solution in solutions
            ],
        }
