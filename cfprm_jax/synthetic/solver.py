"""The noisy solver: solutions that slip, repeat a problem's systematic mistake, restate, and sometimes recover.

Mistakes (:data:`~cfprm_jax.synthetic.world.MISTAKES`) are slips of a moment, or the bias of a problem: one move and one
mistake that a solution of this problem makes with a probability of its own. So where that is above one half the
majority of the solutions agree on the same wrong answer, and only the steps show which ones are correct. A
misconception does the same for a day and a move in every problem, so that a model that imitates solutions learns it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cfprm_jax.synthetic.world import MODULUS, MOVES, Problem, WorldConfig, WorldStep, labels


@dataclasses.dataclass(frozen=True)
class Mistake:
    """How one move is got wrong: the kind, and by how much (in days, or among the moves that the problem lacks)."""

    kind: str
    shift: int


@dataclasses.dataclass(frozen=True)
class Bias:
    """The mistake that solutions of one problem make at one move with the given probability; index -1: none."""

    index: int
    mistake: Mistake
    probability: float


Misconceptions = Mapping[tuple[int, int], Bias]
"""What a solver believes wrongly of a day and a move, in whatever problem they meet; the index of a Bias is unused."""

_NONE = Bias(-1, Mistake("before", 1), 0.0)


def sample_misconceptions(share: float, config: WorldConfig, rng: np.random.Generator) -> dict[tuple[int, int], Bias]:
    """One for that share of all pairs of a day and a move, with the kinds and probabilities of the biases of config."""
    pairs = [(day, move) for day in range(MODULUS) for move in MOVES]
    chosen = rng.permutation(len(pairs))[: round(share * len(pairs))]
    return {
        pairs[i]: Bias(-1, sample_mistake(config.biases, rng), float(rng.uniform(config.min_bias, config.max_bias)))
        for i in sorted(chosen.tolist())
    }


@dataclasses.dataclass(frozen=True)
class SimulatedSolution:
    """A solution of a problem: its steps, their exact labels, and the answer that it ends with."""

    steps: tuple[WorldStep, ...]
    labels: tuple[int, ...]
    answer: int

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the steps."""
        return tuple(step.text for step in self.steps)


def sample_mistake(kinds: Sequence[str], rng: np.random.Generator) -> Mistake:
    """A mistake of one of these kinds and of uniform extent."""
    return Mistake(kinds[int(rng.integers(len(kinds)))], int(rng.integers(1, MODULUS)))


def sample_bias(problem: Problem, config: WorldConfig, rng: np.random.Generator) -> Bias:
    """The systematic mistake of a problem's solver, or with probability 1 - bias_rate none."""
    index = int(rng.integers(len(problem.moves))) if rng.random() < config.bias_rate else -1
    return Bias(index, sample_mistake(config.biases, rng), float(rng.uniform(config.min_bias, config.max_bias)))


def work(problem: Problem, index: int, before: int, mistake: Mistake | None, kind: str) -> WorldStep:
    """One move worked out from the day before it, with the mistake where there is one."""
    move, shift = problem.moves[index], 0
    if mistake is not None and mistake.kind == "move":
        others = [other for other in MOVES if other not in problem.moves]
        move = others[mistake.shift % len(others)]
    elif mistake is not None and mistake.kind == "before":
        before = (before + mistake.shift) % MODULUS
    elif mistake is not None:
        shift = mistake.shift
    return WorldStep(kind, (before + move + shift) % MODULUS, index, before, move)


def solve(
    problem: Problem,
    bias: Bias,
    config: WorldConfig,
    rng: np.random.Generator,
    misconceptions: Misconceptions | None = None,
) -> SimulatedSolution:
    """One solution, drawn from rng; misconceptions act where the bias does not."""
    steps: list[WorldStep] = []
    days, wrong, may_review = [problem.start], -1, True
    while True:
        index, kind = len(days) - 1, "work"
        if index > 0 and may_review and rng.random() < config.review_rate:
            kind, may_review = "again", False
            index = wrong if wrong >= 0 else index - 1
            del days[index + 1 :]
            wrong = -1
        elif index == len(problem.moves):
            break
        mistake = None
        # Going back means looking again, so the bias does not act a second time; slips do.
        if kind == "work" and index == bias.index and rng.random() < bias.probability:
            mistake = bias.mistake
        elif (
            kind == "work"
            and misconceptions
            and rng.random() < (believed := misconceptions.get((days[-1], problem.moves[index]), _NONE)).probability
        ):
            mistake = believed.mistake
        elif rng.random() < config.slip_rate:
            mistake = sample_mistake(config.slips, rng)
        step = work(problem, index, days[-1], mistake, kind)
        if mistake is not None and wrong < 0:
            wrong = index
        if config.split_rate and kind == "work" and rng.random() < config.split_rate:
            steps += [dataclasses.replace(step, kind="take", day=0), WorldStep("get", step.day)]
        else:
            steps.append(step)
        days.append(step.day)
        if rng.random() < config.redundancy_rate:
            steps.append(WorldStep("restate", days[-1]))
        if config.idle_rate and rng.random() < config.idle_rate:
            steps.append(WorldStep("idle", 0))
    steps.append(WorldStep("answer", days[-1]))
    return SimulatedSolution(tuple(steps), labels(problem, steps), days[-1])
