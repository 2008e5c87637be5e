"""The laboratory: a policy that makes mistakes, its solutions with exact labels, and two test sets.

At each level of redundancy, a small language model is trained on demonstrations of the arithmetic world, which contain
slips, misconceptions, and steps that restate, split or add nothing. Its samples are labelled by the exact rule of the
world: one training set per seed, and for all seeds the candidates of test sets with short and with long problems. All
problems are disjoint. Existing files are reused.

There are two kinds of training sets. "samples" are whole solutions of each problem, sampled independently, as
Math-Shepherd has them; they end at their first mistake, as where annotators stop there. "paths" are annotated paths
with alternatives at every step, as PRM800K has them (:mod:`.paths`); their problems are longer, so that solutions share
about as much as PRM800K's, and a third test set, "validation", serves to choose options by.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from cfprm_jax.config import LARGEST_SEED, EncodingConfig
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.data.steps import split_steps
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import paths
from cfprm_jax.experiments.policy import Demonstration, PolicyConfig, train_policy, write_backbone
from cfprm_jax.inference.sampler import Prompt
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import atomic, locks
from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.solver import Bias, Mistake, sample_misconceptions, solve
from cfprm_jax.synthetic.world import DAYS, Problem, WorldConfig, distinct_problems, sample_problem

LEVELS = {"none": (0.0, 0.0, 0.0), "some": (0.2, 0.15, 0.1), "much": (0.5, 0.4, 0.4)}
"""Rates of steps that restate, that are split in two, and that are followed by an empty step."""

CORPORA = ("samples", "paths")
TESTS = {"samples": ("short", "long"), "paths": ("short", "long", "validation")}
_WORLD, _PROBLEMS, _DEMONSTRATIONS = range(3)
_BATCH_ROWS = 256  # candidates that are decoded at once


@dataclasses.dataclass(frozen=True)
class LaboratoryConfig(Options):
    """The laboratory: a synthetic world, its policy and its data."""

    world_seed: int = option(
        0, "Seed of the world, its policy and its test sets, which all seeds share.", lower=0, upper=LARGEST_SEED
    )
    demonstrations: int = option(24000, "Solutions that the policy imitates.", lower=1, upper=10**6)
    misconceptions: float = option(
        0.25, "Share of the pairs of a day and a move that demonstrations tend to get wrong.", lower=0.0, upper=1.0
    )
    corpus: str = option(
        "samples",
        "Training sets. samples: independent solutions of each problem, as Math-Shepherd has them. paths: correct "
        "paths with alternatives at every step, of longer problems, as PRM800K has them.",
        choices=CORPORA,
    )
    train_problems: int = option(256, "Problems of a training set.", lower=1, upper=10**5)
    solutions_per_problem: int = option(
        32, "Solutions sampled per problem; with --corpus=paths, next steps sampled per step.", lower=1, upper=4096
    )
    rollouts: int = option(
        8, "With --grid=labels, rollouts of each distinct prefix of a training set.", lower=1, upper=4096
    )
    test_questions: int = option(200, "Questions of each test set.", lower=1, upper=10**5)
    candidates: int = option(64, "Sampled candidates of each test question.", lower=1, upper=4096)
    sampling_temperature: float = option(1.0, "Temperature of the policy.", lower=1e-4, upper=100.0, also=0.0)


@dataclasses.dataclass(frozen=True)
class Level:
    """The files of one level of redundancy.

    Attributes:
      model: the policy's network, which reward models start from.
      tests: candidates file of each test set.
      train: stepwise training data of each seed.
    """

    model: pathlib.Path
    tests: dict[str, pathlib.Path]
    train: dict[int, pathlib.Path]


def world(level: str, corpus: str, kind: str) -> WorldConfig:
    """The world at a level of redundancy, with problems of one of its kinds."""
    moves = _MOVES[corpus][kind]
    restate, split, idle = LEVELS[level]
    return WorldConfig(
        min_moves=moves[0],
        max_moves=moves[1],
        repeat_moves=corpus == "paths",
        redundancy_rate=restate,
        split_rate=split,
        idle_rate=idle,
        review_rate=0.0,
        slip_rate=0.04,
        slips=("before", "result"),
        biases=("before", "result"),
        min_bias=0.5,
        max_bias=0.95,
    )


_MOVES = {
    "samples": {"short": (3, 4), "long": (5, 6), "train": (3, 6), "demonstrations": (3, 6)},
    # Paths of about 18 steps at redundancy "some", so that expanded tokens are more than 10 times the distinct ones.
    "paths": {
        "short": (6, 7),
        "long": (12, 14),
        "validation": (6, 14),
        "train": (12, 14),
        "demonstrations": (3, 14),
    },
}
# Maximum steps of a path: several times those of any solution.
_LONGEST_PATH = 100
# Tokens of a sampled step after which it is cut; a longer text is no step of this world.
_LONGEST_STEP = 16


def make(
    directory: str | pathlib.Path,
    level: str,
    seeds: Sequence[int],
    *,
    config: LaboratoryConfig,
    encoding: EncodingConfig,
    mesh: Mesh,
    log: Callable[[str], None],
) -> Level:
    """Everything of one level, made in a directory of its own.

    Raises:
      UserError: the directory was made with other options, or problems are too few.
    """
    root = pathlib.Path(directory) / level
    root.mkdir(parents=True, exist_ok=True)
    made_with = dataclasses.asdict(config)
    del made_with["rollouts"]  # in the names of the files that have them
    with locks.held(root / "lock", wait=True):  # others wait, and then find what this one made
        _require_same(root / "config.json", {**made_with, **dataclasses.asdict(encoding)})
        laboratory = _Laboratory(root, level, config, encoding=encoding, mesh=mesh, log=log)
        laboratory.policy()
        return Level(
            laboratory.backbone(),
            {name: laboratory.test(name) for name in TESTS[config.corpus]},
            {seed: laboratory.train(seed) for seed in seeds},
        )


class _Laboratory:
    def __init__(
        self,
        root: pathlib.Path,
        level: str,
        config: LaboratoryConfig,
        *,
        encoding: EncodingConfig,
        mesh: Mesh,
        log: Callable[[str], None],
    ) -> None:
        self._root, self._level, self._config, self._encoding = root, level, config, encoding
        self._mesh, self._log = mesh, log
        taken: set[Problem] = set()
        rng = np.random.default_rng((config.world_seed, _PROBLEMS))
        self._tests = {
            name: distinct_problems(world(level, config.corpus, name), config.test_questions, rng, taken)
            for name in TESTS[config.corpus]
        }
        self._taken = frozenset(taken)

    def policy(self) -> None:
        """The policy, which samples."""
        target = self._root / "policy"
        if target.exists():
            return
        # transformers takes seconds to import.
        from cfprm_jax.synthetic.model import make_config
        from cfprm_jax.synthetic.tokenizer import make_tokenizer

        tokenizer = make_tokenizer()
        with atomic.new_directory(target) as partial:
            loss = train_policy(
                partial,
                list(self._demonstrations()),
                tokenizer,
                make_config(len(tokenizer)),
                encoding=self._encoding,
                config=PolicyConfig(row_length=max(self._encoding.max_length, PolicyConfig.row_length)),
                seed=self._config.world_seed,
            )
        self._log(f"policy      redundancy {self._level}: {loss:.3f} nats a token at the end")

    def backbone(self) -> pathlib.Path:
        """What reward models start from."""
        target = self._root / "backbone"
        if not target.exists():
            with atomic.new_directory(target) as partial:
                write_backbone(self._root / "policy", partial, self._encoding)
        return target

    def _demonstrations(self) -> Iterator[Demonstration]:
        config = world(self._level, self._config.corpus, "demonstrations")
        # The misconceptions are the world's own, whatever the redundancy.
        beliefs = np.random.default_rng((self._config.world_seed, _WORLD))
        misconceptions = sample_misconceptions(self._config.misconceptions, config, beliefs)
        rng = np.random.default_rng((self._config.world_seed, _DEMONSTRATIONS))
        nothing = Bias(-1, Mistake("before", 1), 0.0)
        count = 0
        while count < self._config.demonstrations:
            problem = sample_problem(config, rng)
            if problem not in self._taken:
                count += 1
                yield problem.question, solve(problem, nothing, config, rng, misconceptions).texts

    def test(self, name: str) -> pathlib.Path:
        """The candidates of a test set, judged."""
        target = self._root / f"{name}.jsonl"
        if not target.exists():
            sampled = self._sample(name, self._tests[name], self._config.candidates, self._config.world_seed)
            _write(target, (_judged(row, name) for row in sampled))
            self._log(f"test        redundancy {self._level}, {name}: {describe(target)}")
        return target

    def train(self, seed: int) -> pathlib.Path:
        """The training set of a seed."""
        target = self._root / f"train_{seed}.jsonl"
        if not target.exists():
            rng = np.random.default_rng((self._config.world_seed, seed, _PROBLEMS))
            self._train_paths(target, seed, rng) if self._config.corpus == "paths" else self._train(target, seed, rng)
        return target

    def _train_paths(self, target: pathlib.Path, seed: int, rng: np.random.Generator) -> None:
        """Paths of --train_problems problems, with their alternatives."""
        from cfprm_jax.inference.policy import open_policy
        from cfprm_jax.inference.sampler import Sampler, Sampling

        config = self._config
        problems = distinct_problems(world(self._level, "paths", "train"), config.train_problems, rng, set(self._taken))
        policy = open_policy(self._root / "policy", "float32", self._mesh)
        separator = policy.tokenizer(self._encoding.separator, add_special_tokens=False)["input_ids"]
        if len(separator) != 1:
            raise UserError(f"--step_separator: {self._encoding.step_separator} is not one token of the policy")
        ends = {*policy.stops, *separator}
        policy = dataclasses.replace(policy, stops=tuple(sorted(ends)))
        sampling = Sampling(config.sampling_temperature, max_new_tokens=_LONGEST_STEP, seed=seed)
        sampler = Sampler(policy, sampling, _BATCH_ROWS, self._mesh)

        def draw(prompts: Sequence[Prompt]) -> Iterator[Sequence[np.ndarray]]:
            for samples in sampler.sample(prompts, config.solutions_per_problem):
                yield [np.array([token for token in one.tokens.tolist() if token not in ends]) for one in samples]

        found = paths.annotate(problems, draw, policy.tokenizer, self._encoding, _LONGEST_PATH)
        rows = [
            row
            for number, path in enumerate(found)
            for row in path.rows(f"train_{seed}_{number:05d}", DAYS[path.problem.answer])
        ]
        _write(target, iter(rows))
        labels = np.concatenate([row["labels"] for row in rows])
        self._log(
            f"train       redundancy {self._level}, seed {seed}: {len(found):,} paths of "
            f"{np.mean([len(path.steps) for path in found]):.1f} steps, {len(rows) / len(found):.1f} solutions each, "
            f"{labels.mean():.0%} of the labels positive"
        )

    def _train(self, target: pathlib.Path, seed: int, rng: np.random.Generator) -> None:
        """Independent samples: always the same number of solutions, of two steps or more."""
        config = self._config
        total = config.train_problems * config.solutions_per_problem
        # Some more, as a sample of one step gives nothing to merge and is left out.
        drawn = config.train_problems + config.train_problems // 10 + 2
        problems = distinct_problems(world(self._level, "samples", "train"), drawn, rng, set(self._taken))
        sampled = self._sample(f"train_{seed}", problems, config.solutions_per_problem, seed)
        rows = [row for question in sampled for row in _stepwise(question)]
        if len(rows) < total:
            raise UserError(f"{target}: the policy gave {len(rows)} solutions of two steps or more, not {total}")
        _write(target, iter(rows[:total]))
        labels = np.concatenate([row["labels"] for row in rows[:total]])
        self._log(
            f"train       redundancy {self._level}, seed {seed}: {total:,} solutions, "
            f"{len(labels) / total:.1f} steps each, {labels.mean():.0%} of them positive"
        )

    def _sample(self, name: str, problems: Sequence[Problem], candidates: int, seed: int) -> list[dict[str, Any]]:
        """Rows of a candidates file with "steps"."""
        # transformers takes seconds to import.
        from cfprm_jax.inference.candidates import candidates_row, completions, encode_prompts
        from cfprm_jax.inference.policy import open_policy
        from cfprm_jax.inference.sampler import Sampler, Sampling

        questions = [
            QuestionRow(f"{name}_{number:05d}", problem.question, DAYS[problem.answer], dataset=None, source=name)
            for number, problem in enumerate(problems)
        ]
        policy = open_policy(self._root / "policy", "float32", self._mesh)
        max_new_tokens = self._encoding.max_length
        prompts = encode_prompts(
            questions, policy.tokenizer, policy.config.backbone.longest, max_new_tokens, self._encoding.system_prompt
        )
        sampling = Sampling(self._config.sampling_temperature, max_new_tokens=max_new_tokens, seed=seed)
        sampler = Sampler(policy, sampling, min(_BATCH_ROWS, len(questions) * candidates), self._mesh)
        sampled = sampler.sample(prompts, candidates)
        rows = [
            candidates_row(question, completions(policy, found))
            for question, found in zip(questions, sampled, strict=True)
        ]
        separator = self._encoding.separator
        for row in rows:
            for candidate in row["candidates"]:
                candidate["steps"] = split_steps(candidate["text"], separator)
        return rows


def _problem(row: dict[str, Any]) -> Problem:
    problem = judge.parse_problem(row["question"])
    assert problem is not None, row["question"]
    return problem


def _judged(row: dict[str, Any], dataset: str) -> dict[str, Any]:
    """A row of a candidates file, each candidate graded by the rule of the world."""
    problem, candidates = _problem(row), []
    for candidate in row["candidates"]:
        judgement = judge.judge(problem, candidate["steps"])
        candidates.append(
            {
                "steps": candidate["steps"],
                "predicted": None if judgement.answer is None else DAYS[judgement.answer],
                "correct": judgement.answer == problem.answer,
                "labels": list(judgement.labels),
            }
        )
    return {**row, "dataset": dataset, "candidates": candidates}


def _stepwise(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Stepwise rows of the solutions of a question that have two steps or more, until their first mistake.

    One whose first step is wrong keeps its second, so that all have something to merge and every granularity has the
    same solutions.
    """
    problem = _problem(row)
    for number, candidate in enumerate(row["candidates"]):
        labels = judge.judge(problem, candidate["steps"]).labels
        end = max(labels.index(0) + 1, 2) if 0 in labels else len(labels)
        if len(labels) >= 2:
            yield {
                "id": f"{row['id']}_{number}",
                "prompt": row["question"],
                "completions": candidate["steps"][:end],
                "labels": [bool(label) for label in labels[:end]],
                "answer": row["answer"],
            }


def describe(path: pathlib.Path) -> str:
    """What a test set holds, in one line."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    correct = [[candidate["correct"] for candidate in row["candidates"]] for row in rows]
    steps = [len(candidate["steps"]) for row in rows for candidate in row["candidates"]]
    distinct = [len({tuple(candidate["steps"]) for candidate in row["candidates"]}) for row in rows]
    return (
        f"{len(rows)} questions x {len(correct[0])} candidates ({np.mean(distinct):.0f} distinct), "
        f"{np.mean(steps):.1f} steps each, pass@1 {np.mean([np.mean(line) for line in correct]):.1%}, "
        f"oracle {np.mean([any(line) for line in correct]):.1%}"
    )


def _write(path: pathlib.Path, rows: Iterator[dict[str, Any]]) -> None:
    """A file that is whole or is not there."""
    with atomic.writing(path) as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)


def _require_same(path: pathlib.Path, options: dict[str, Any]) -> None:
    if path.exists():
        before = json.loads(path.read_text())
        changed = [
            f"{name} was {before.get(name)} and is {options[name]}"
            for name in options
            if before.get(name) != options[name]
        ]
        if changed:
            raise UserError(
                f"{path.parent} was made with other options: {'; '.join(changed)}. Name another --output_dir"
            )
    atomic.write_json(path, options, indent=1)
