"""One cell of the grid: a run of train kept in memory, its scores of the test sets, and which questions it gets right.

The network, weights, data, batches and compiled steps are those of the train command, the scores those of the score
command, and the choices those of bon; only files in between are left out. Cells of one process share what is compiled:
steps are built once for each loss and number of steps, and the forward pass once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.loader import Loader
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import aggregation
from cfprm_jax.grading.grader import Grader
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.scorer import Item, Plan, Scorer
from cfprm_jax.run import inputs
from cfprm_jax.run.evaluation import auroc
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup, setup
from cfprm_jax.runtime import digests
from cfprm_jax.sharding import rules
from cfprm_jax.training import program

_MEASURED_STEPS = 64

SUBSETS = ("first", "all")
"""Which n candidates are chosen from: the first in file order, as bon does; or every subset of n, on average."""


@dataclasses.dataclass(frozen=True, eq=False)
class TestSet:
    """The candidates of a test set, all of its questions having the same number of them.

    Attributes:
      name: in tables.
      path: its candidates file.
      items: question and steps of every candidate, question by question.
      correct: whether each is right.
      group: which candidates of a question give the same answer; -1 for none.
      split: counts of candidates given as text.
      steps: labelled steps up to the first mistake of every candidate, for AUROC; None where files have no "labels".
    """

    name: str
    path: pathlib.Path
    items: list[Item]
    correct: Bool[np.ndarray, "questions candidates"]
    group: Int[np.ndarray, "questions candidates"]
    split: SplitCounts
    steps: LabelledSteps | None = None

    def majority(self, n: int) -> Bool[np.ndarray, " questions"]:
        """Whether the answer that most of the first n candidates give, the first given on a tie, is right."""
        right = []
        for groups, correct in zip(self.group[:, :n], self.correct[:, :n], strict=True):
            counts = np.bincount(groups[groups >= 0], minlength=1)
            right.append(bool(counts.any()) and bool(correct[np.flatnonzero(groups == counts.argmax())[0]]))
        return np.array(right)


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSteps:
    """Steps of a test set's candidates that have a label; what follows a mistake is no part of it.

    Attributes:
      item, step: which candidate's, and which of its steps.
      label: whether it is right.
      first: whether it is the first occurrence of a distinct step: same question, same steps before it, same text.
    """

    item: Int[np.ndarray, " steps"]
    step: Int[np.ndarray, " steps"]
    label: Bool[np.ndarray, " steps"]
    first: Bool[np.ndarray, " steps"]

    def auroc(self, logits: Sequence[Float[np.ndarray, " steps"] | None]) -> dict[str, float]:
        """AUROC over all steps, and over distinct ones, of candidates that have logits."""
        z = np.full(len(self.item), np.nan)
        for place, (item, step) in enumerate(zip(self.item.tolist(), self.step.tolist(), strict=True)):
            own = logits[item]
            z[place] = np.nan if own is None or step >= len(own) else own[step]
        known = ~np.isnan(z)
        once = known & self.first
        return {"all": auroc(z[known], self.label[known]), "distinct": auroc(z[once], self.label[once])}


def labelled_steps(items: Sequence[Item], labels: Sequence[Sequence[float | None] | None]) -> LabelledSteps | None:
    """The labelled steps of candidates up to the first wrong one; None where one has no labels, or no step has."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    out: list[tuple[int, int, bool, bool]] = []
    for number, ((question, steps), own) in enumerate(zip(items, labels, strict=True)):
        if own is None:
            return None
        for step, label in enumerate(own):
            if label is None:
                continue
            key = (question, tuple(steps[: step + 1]))
            out.append((number, step, label > 0.5, key not in seen))
            seen.add(key)
            if label <= 0.5:
                break
    if not out:
        return None
    item, place, label_, first = (np.array(column) for column in zip(*out, strict=True))
    return LabelledSteps(item, place, label_, first)


def _labels(value: Any) -> list[float | None] | None:
    """A list of numbers and null; None for anything else, which a candidates file may hold under any name."""
    numbers = isinstance(value, list) and all(
        one is None or (isinstance(one, int | float) and not isinstance(one, bool)) for one in value
    )
    return value if numbers else None


def read_test(name: str, path: str | pathlib.Path, encoder: Encoder, most: int) -> TestSet:
    """Reads a test set: the first `most` candidates of each question, which must contain "correct".

    Raises:
      UserError: the file is not a candidates file, a candidate has no "correct", or a question has too few candidates.
    """
    items: list[Item] = []
    correct, group, split = [], [], SplitCounts()
    labels: list[Sequence[float | None] | None] = []
    for question, judgement in Grader("none").judge(read_candidates(str(path))):
        if len(question.candidates) < most:
            raise UserError(f"{question.source}: {len(question.candidates)} candidates, but --n={most} needs as many")
        for candidate in question.candidates[:most]:
            steps = encoder.split(candidate.text or "") if candidate.steps is None else candidate.steps
            if candidate.steps is None:
                split.add(candidate.text or "", steps)
            items.append((question.question, steps))
        labels += [_labels(candidate.get("labels")) for candidate in question.row["candidates"][:most]]
        correct.append(judgement.correct[:most])
        group.append(judgement.group[:most])
    steps_with_labels = labelled_steps(items, labels)
    return TestSet(name, pathlib.Path(path), items, np.array(correct, bool), np.array(group), split, steps_with_labels)


@dataclasses.dataclass(frozen=True, eq=False)
class CellOutcome:
    """What a cell found.

    Attributes:
      num_steps: optimizer steps.
      tokens: tokens computed in training, shared prefixes once.
      final_loss: mean over the last tenth of the steps.
      digest: SHA-256 of the trained parameters.
      auroc: test set to AUROC over "all" labelled steps and over "distinct" ones, where the set has labels.
      right: "test set/aggregation/subsets" to the share of choices of n that are right, for every question and n.
    """

    num_steps: int
    tokens: int
    final_loss: float
    digest: str
    auroc: dict[str, dict[str, float]]
    right: dict[str, Float[np.ndarray, "questions n"]]


class Bench:
    """Runs cells, one after another, and keeps what they share."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._scorers: dict[Any, Scorer] = {}
        self._plans: dict[Any, Plan] = {}

    def run(self, config: TrainConfig, tests: Sequence[TestSet], n: Sequence[int]) -> CellOutcome:
        """Train as the train command would, then score and choose.

        Raises:
          UserError: what the command raises, or a loss that is not finite.
        """
        made = train(config, self._mesh)
        loaded = made.loaded
        aurocs, right = self._choices(loaded, tests, n)
        return CellOutcome(made.setup.num_steps, made.tokens, made.final_loss, digest(loaded.params), aurocs, right)

    def _choices(
        self, loaded: LoadedPRM, tests: Sequence[TestSet], n: Sequence[int]
    ) -> tuple[dict[str, dict[str, float]], dict[str, Float[np.ndarray, "questions n"]]]:
        """AUROC of each test set, and the shares of right choices."""
        key = (loaded.config, loaded.encoding)
        if key not in self._scorers:
            self._scorers[key] = Scorer(loaded, mesh=self._mesh)
        scorer = self._scorers[key].with_params(loaded.params)
        right, aurocs = {}, {}
        for test in tests:
            # How candidates lie in rows is the same for all reward models.
            if (key, test.path) not in self._plans:
                self._plans[key, test.path] = scorer.plan(test.items)
            logits = scorer.start(self._plans[key, test.path]).scores()
            if test.steps is not None:
                aurocs[test.name] = test.steps.auroc(logits)
            for name in AGGREGATIONS:
                rank = aggregation.rank(logits, name).reshape(test.correct.shape)
                for subsets in SUBSETS:
                    choose = first_n if subsets == "first" else every_n
                    right[f"{test.name}/{name}/{subsets}"] = choose(rank, test.correct, n)
        return aurocs, right


# Kept, so that cells which differ in seed or data alone do not compile again.
_program = functools.lru_cache(maxsize=32)(program.build)


class Trained(NamedTuple):
    """A run of train kept in memory.

    Attributes:
      params: what was trained, after the last step.
      tokens: computed in training, shared prefixes once.
      final_loss: mean over the last tenth of the steps.
    """

    setup: Setup
    params: Any
    tokens: int
    final_loss: float

    @property
    def loaded(self) -> LoadedPRM:
        """The PRM, ready to score."""
        network = dataclasses.replace(self.setup.network.config, remat="none")
        return LoadedPRM(network, self.params, self.setup.tokenizer, self.setup.config.encoding, {})


def train(config: TrainConfig, mesh: Mesh) -> Trained:
    """Train as the train command would.

    Raises:
      UserError: what the command raises, or a loss that is not finite.
    """
    made = setup(config, mesh, inputs.materialise(config, pathlib.Path(config.run.output_dir)), build=_program)
    built, num_steps = made.program, made.num_steps
    state, _ = made.create_state()
    losses, tokens = [], 0
    with contextlib.closing(made.data.loader.iterator()) as batches:
        for _ in range(num_steps):
            batch = next(batches)
            state, metrics = built.train_step(state, rules.put_batch(batch.packed, built.batch_shardings))
            losses.append(metrics["loss"])
            tokens += batch.tokens_computed
    values = np.asarray(jax.device_get(losses))
    if not np.isfinite(values).all():
        raise UserError(f"the loss of step {int(np.flatnonzero(~np.isfinite(values))[0]) + 1} is not finite")
    return Trained(made, state.params, tokens, float(values[-max(num_steps // 10, 1) :].mean()))


def tokens_a_step(loader: Loader) -> float:
    """The mean number of tokens that a step computes, from at most 64 batches at even distances."""
    places = np.linspace(0, loader.num_steps - 1, min(_MEASURED_STEPS, loader.num_steps)).astype(int)
    return float(np.mean([loader.batch(int(place)).tokens_computed for place in places]))


def first_n(
    rank: Float[np.ndarray, "questions candidates"], correct: Bool[np.ndarray, "questions candidates"], n: Sequence[int]
) -> Float[np.ndarray, "questions n"]:
    """1 where the highest of the first n candidates, the first of them on a tie, is right; else 0."""
    columns = [np.take_along_axis(correct, rank[:, :size].argmax(axis=1)[:, None], axis=1)[:, 0] for size in n]
    return np.stack(columns, axis=1).astype(np.float64)


def every_n(
    rank: Float[np.ndarray, "questions candidates"], correct: Bool[np.ndarray, "questions candidates"], n: Sequence[int]
) -> Float[np.ndarray, "questions n"]:
    """The share of all subsets of n candidates whose highest, the first of them on a tie, is right.

    Of N candidates the one with k above it is the highest of C(N - 1 - k, n - 1) subsets. This is the mean over random
    draws without their noise.
    """
    candidates = rank.shape[1]
    order = np.argsort(-rank, axis=1, kind="stable")
    sorted_correct = np.take_along_axis(correct, order, axis=1).astype(np.float64)
    shares = np.array(
        [
            [math.comb(candidates - 1 - k, size - 1) / math.comb(candidates, size) for size in n]
            for k in range(candidates)
        ]
    )
    return sorted_correct @ shares


def digest(params: Mapping[str, Any]) -> str:
    """SHA-256 of the parameters' names, shapes and bytes."""
    named = ((path, np.ascontiguousarray(leaf)) for path, leaf in _leaves(params))
    return digests.of_parts(part for path, x in named for part in (f"{path} {x.dtype} {x.shape}".encode(), x.tobytes()))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name in sorted(tree):
        value = tree[name]
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
