"""Search against Best-of-N in the laboratory: accuracy and cost of each method, by the same policy and reward models.

A cell trains a reward model and then searches the first questions of each test set with every setting. Costs are tokens
that the two networks process for a question, as the search command counts them; in the laboratory both networks have
the same layers, so the sum of both counts is proportional to their FLOPs.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import cell as cells
from cfprm_jax.experiments.cell_runs import StoredResult, read_result, run_cells, write_result
from cfprm_jax.experiments.grid import Cell
from cfprm_jax.experiments.runner import Materials, Runner
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.options import Options, option, whole_number
from cfprm_jax.runtime import digests
from cfprm_jax.searching.methods import METHODS, SearchOptions, search
from cfprm_jax.synthetic import judge

_MOST_STEPS = 100
_CACHE_TOKENS = 1 << 14


@dataclasses.dataclass(frozen=True)
class SearchGridConfig(Options):
    """What --grid=search compares."""

    search_methods: tuple[str, ...] = option(
        ("best_of_n", "beam", "dvts"), "Search methods.", choices=METHODS, kind="list"
    )
    search_n: tuple[str, ...] = option(("2", "4", "8", "16", "32"), "Solutions searched in parallel.", kind="list")
    search_granularities: tuple[str, ...] = option(
        ("1", "2", "4"), "Steps between two evaluations of the reward model, for beam and dvts.", kind="list"
    )
    search_width: int = option(
        4,
        "Continuations of each kept solution; settings with n not a multiple of it are left out.",
        lower=1,
        upper=4096,
    )
    search_aggregation: str = option("min", "Aggregation of step scores for ranking.", choices=AGGREGATIONS)
    search_questions: int = option(100, "Questions of each test set.", lower=1, upper=10**5)

    @property
    def settings(self) -> dict[str, SearchOptions]:
        """By name.

        Raises:
          UserError: an axis is not of whole numbers, or empty.
        """
        sizes = [whole_number(text, "--search_n", 1, 4096) for text in self.search_n]
        checks = [whole_number(text, "--search_granularities", 1, 1000) for text in self.search_granularities]
        found = {}
        for method in self.search_methods:
            plain = method == "best_of_n"
            for n in sizes:
                if not plain and (n % self.search_width or (n == self.search_width and method == "beam")):
                    continue
                for every in [1] if plain else checks:
                    name = f"{method}.n{n}" if plain else f"{method}.n{n}.g{every}"
                    found[name] = SearchOptions(
                        method,
                        n,
                        self.search_width,
                        every,
                        max_steps=_MOST_STEPS,
                        aggregation=self.search_aggregation,
                    )
        if not found:
            raise UserError("--search_methods and --search_n leave no setting")
        return found


class SearchResult(NamedTuple):
    """What is kept of a cell.

    Attributes:
      arrays: "right/TEST/SETTING", whether each question's first solution is right; "policy/TEST/SETTING" and
        "reward/TEST/SETTING", tokens that each network processed for it.
    """

    cell: Cell
    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


class SearchRunner:
    """Trains reward models and searches with them."""

    def __init__(self, materials: Materials, config: SearchGridConfig, mesh: Mesh, log: Callable[[str], None]) -> None:
        self._materials, self._config, self._mesh, self._log = materials, config, mesh, log
        self._settings = config.settings
        self._runner = Runner(materials, mesh, log)
        assert materials.laboratory is not None
        self._temperature = materials.laboratory.sampling_temperature

    def run(
        self, grid: Sequence[Cell], after: Callable[[Sequence[SearchResult]], object] = lambda _: None
    ) -> list[SearchResult]:
        """The results of all cells, in the order of the grid, those that are there already among them."""
        self._runner.prepare(grid)
        return run_cells(grid, self._directory, self._load, self._run, line=_line, log=self._log, after=after)

    def _directory(self, cell: Cell) -> pathlib.Path:
        return self._runner.cell_directory(cell)

    def _fingerprint(self, cell: Cell) -> str:
        identity = [self._runner.fingerprint(cell), dataclasses.asdict(self._config)]
        if self._temperature != 1:  # 1 is what searches had whatever the temperature, before it reached them
            identity.append({"sampling_temperature": self._temperature})
        return digests.of_json(identity)

    def _load(self, cell: Cell) -> SearchResult | None:
        stored = read_result(self._directory(cell) / "search.npz", lambda: self._fingerprint(cell))
        return None if stored is None else SearchResult(cell, *stored)

    def _run(self, cell: Cell) -> tuple[SearchResult, float]:
        started = time.monotonic()
        config = self._runner.train_config(cell)
        made = cells.train(config, self._mesh)
        arrays = self._search(cell, made.loaded)
        summary = {"fingerprint": self._fingerprint(cell), "steps": made.setup.num_steps, "tokens": made.tokens}
        write_result(self._directory(cell) / "search.npz", StoredResult(summary, arrays), config)
        return SearchResult(cell, summary, arrays), time.monotonic() - started

    def _search(self, cell: Cell, loaded: LoadedPRM) -> dict[str, np.ndarray]:
        # transformers takes seconds to import.
        from cfprm_jax.inference.candidates import encode_prompts
        from cfprm_jax.inference.policy import open_policy
        from cfprm_jax.inference.prefix_scorer import PrefixScorer
        from cfprm_jax.inference.sampler import Sampling
        from cfprm_jax.searching.rewards import PRMReward
        from cfprm_jax.searching.step_sampler import StepSampler

        policy = open_policy(self._runner.policy(cell.level), "float32", self._mesh)
        encoding = self._materials.base.encoding
        sampling = Sampling(self._temperature, max_new_tokens=encoding.max_length, seed=cell.seed)
        arrays = {}
        for test in self._runner.tests(cell.level):
            rows = [json.loads(line) for line in test.path.read_text().splitlines()][: self._config.search_questions]
            questions = [
                QuestionRow(row["id"], row["question"], row["answer"], dataset=None, source=test.name) for row in rows
            ]
            prompts = encode_prompts(
                questions,
                policy.tokenizer,
                policy.config.backbone.longest,
                sampling.max_new_tokens,
                encoding.system_prompt,
            )
            for name, options in self._settings.items():
                # New for each setting, so that none finds what another computed.
                reward = PRMReward(PrefixScorer(loaded, _CACHE_TOKENS, mesh=self._mesh))
                sampler = StepSampler(policy, sampling, options.n, encoding.separator, self._mesh)
                found = []
                for question, prompt in zip(questions, prompts, strict=True):
                    solutions, cost = search(prompt, question.question, sampler, reward, options)
                    problem = judge.parse_problem(question.question)
                    assert problem is not None, question.question
                    steps = solutions[0].partial.steps if solutions else ()
                    right = bool(steps) and judge.judge(problem, steps).answer == problem.answer
                    found.append((right, cost.policy_tokens, cost.reward_tokens))
                for kind, column in zip(("right", "policy", "reward"), zip(*found, strict=True), strict=True):
                    arrays[f"{kind}/{test.name}/{name}"] = np.array(column, np.float64)
        return arrays


def _line(result: SearchResult) -> str:
    best: dict[str, float] = {}
    for name, right in result.arrays.items():
        if name.startswith("right/"):
            method = name.split("/")[2].split(".")[0]
            best[method] = max(best.get(method, 0.0), float(right.mean()))
    return f"{result.summary['steps']} steps; best of " + ", ".join(f"{k} {v:.1%}" for k, v in best.items())
