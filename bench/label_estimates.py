"""python bench/label_estimates.py: hard and soft labels against exact ones, for N = 1 to 64 rollouts.

The steps of the synthetic world have exact labels, and here also an exact probability that a solver who slips at a move
with a given probability still reaches the answer: after a right step and after a wrong one, which only a second slip
can put right. Counts are drawn from it. Columns, over all steps but the last of each solution: accuracy of hard (at
least one success) and its share of wrong steps called right, which rises with N; accuracy of soft at 0.5; its squared
distance to the exact probability, which falls; and its calibration error (ten bins, against the exact label).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import Any

import numpy as np
from common import write_json

from cfprm_jax import flags
from cfprm_jax.config import LARGEST_SEED, EstimateConfig
from cfprm_jax.data.estimates import RolloutCounts, labels
from cfprm_jax.labelling import first_error
from cfprm_jax.labelling.rollouts import Outcome, Rollout
from cfprm_jax.options import Options, option
from cfprm_jax.synthetic.solver import sample_bias, solve
from cfprm_jax.synthetic.world import MODULUS, Problem, WorldConfig, WorldStep, distinct_problems

ROLLOUTS = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True)
class EstimatesConfig(Options):
    """Accuracy and calibration of step labels from rollouts, in the synthetic world."""

    problems: int = option(500, "Problems, with four solutions each.", lower=1, upper=10**5)
    slip_rate: float = option(0.15, "Probability that the policy slips at a move.", lower=0.0, upper=1.0)
    seed: int = option(0, "Seed of problems, solutions and rollouts.", lower=0, upper=LARGEST_SEED)
    output: str = option("", "JSON file for the figures; empty is standard output.")


@functools.cache
def success(right: bool, moves: int, slip: float) -> float:
    """Probability to end at the right day, by the number of moves left; a slip shifts the day by one of six amounts."""
    if moves == 0:
        return float(right)
    stays, other = success(right, moves - 1, slip), success(not right, moves - 1, slip)
    if right:
        return (1 - slip) * stays + slip * other
    return (1 - slip) * stays + slip * (other + (MODULUS - 2) * stays) / (MODULUS - 1)


def cases(config: EstimatesConfig) -> list[tuple[list[int], list[float]]]:
    """Exact labels and probabilities of each solution's steps but the last."""
    world = WorldConfig(review_rate=0.0)
    rng = np.random.default_rng(config.seed)
    found = []
    for problem in distinct_problems(world, config.problems, rng, set()):
        bias = sample_bias(problem, world, rng)
        for _ in range(4):
            solution = solve(problem, bias, world, rng)
            states = [_state(problem, solution.steps[:size]) for size in range(1, len(solution.steps))]
            exact = [success(right, moves, config.slip_rate) for right, moves in states]
            found.append((list(solution.labels[:-1]), exact))
    return found


def _state(problem: Problem, steps: tuple[WorldStep, ...]) -> tuple[bool, int]:
    """Whether the day is right after these steps, and the moves left."""
    worked = [step for step in steps if step.index >= 0]
    done = worked[-1].index + 1 if worked else 0
    day = worked[-1].day if worked else problem.start
    return day == problem.days[done], len(problem.moves) - done


def measure(config: EstimatesConfig) -> dict[str, Any]:
    """The table, and the cost of a bisection."""
    solutions, rng = cases(config), np.random.default_rng((config.seed, 1))
    draws = [rng.random((len(exact), max(ROLLOUTS))) < np.array(exact)[:, None] for _, exact in solutions]
    truth = np.concatenate([known for known, _ in solutions])
    probability = np.concatenate([exact for _, exact in solutions])
    rows = []
    for count in ROLLOUTS:
        hard, soft = (_labels(draws, count, estimate) for estimate in ("hard", "soft"))
        wrong = truth == 0
        rows.append(
            {
                "rollouts": count,
                "hard_accuracy": float((hard == truth).mean()),
                "hard_wrong_called_right": float(hard[wrong].mean()),
                "soft_accuracy": float(((soft > 0.5) == truth).mean()),
                "soft_squared_error": float(np.square(soft - probability).mean()),
                "soft_calibration_error": _calibration(soft, truth),
                "hard_calibration_error": _calibration(hard, truth),
            }
        )
    return {"steps": len(truth), "wrong_steps": float((truth == 0).mean()), "rows": rows, **_bisection(draws)}


def _labels(draws: list[np.ndarray], count: int, estimate: str) -> np.ndarray:
    options = EstimateConfig(estimate=estimate, after_first_error="keep")
    found = [
        labels(RolloutCounts(drawn[:, :count].sum(axis=1).tolist(), [count] * len(drawn)), options) for drawn in draws
    ]
    return np.concatenate(found).astype(float)


def _calibration(scores: np.ndarray, truth: np.ndarray) -> float:
    bins = np.minimum((scores * 10).astype(int), 9)
    parts = [(bins == place) for place in range(10)]
    return float(sum(abs(scores[part].sum() - truth[part].sum()) for part in parts) / len(truth))


def _bisection(draws: list[np.ndarray]) -> dict[str, Any]:
    """Bisection against a sweep with 8 rollouts: the same first zero wherever counts are monotone, for less."""
    monotone = same = swept = searched = bound = 0
    for drawn in draws:
        outcomes = [Outcome(tuple(Rollout(bool(hit), 1, False, 1) for hit in row[:8])) for row in drawn]
        steps = [str(number) for number in range(len(outcomes) + 1)]
        method, rolled = first_error.bisect(steps), 0
        try:
            wanted = next(method)
            while True:
                rolled += len(wanted)
                wanted = method.send({prefix: outcomes[len(prefix) - 1] for prefix in wanted})
        except StopIteration as end:
            found = end.value
        zeros = [one.successes == 0 for one in outcomes]
        if zeros == sorted(zeros):
            monotone += 1
            first = [one is not None and one.successes == 0 for one in found]
            same += (zeros.index(True) if True in zeros else None) == (first.index(True) if True in first else None)
        swept, searched = swept + len(outcomes), searched + rolled
        bound += math.ceil(math.log2(len(steps)))
    return {
        "monotone_solutions": monotone, "same_first_zero": same, "solutions": len(draws),
        "rollouts_of_bisect_to_sweep": searched / swept, "bound": bound / swept,
    }  # fmt: skip


def main(config: EstimatesConfig) -> int:
    """Print the table, write the figures."""
    figures = measure(config)
    print(f"{figures['steps']:,} steps, {figures['wrong_steps']:.1%} of them wrong")
    names = list(figures["rows"][0])
    print("  ".join(names))
    for row in figures["rows"]:
        print("  ".join(f"{row[name]:{len(name)}.3f}" if name != names[0] else f"{row[name]:8}" for name in names))
    print(
        f"bisect: the first zero of a sweep in {figures['same_first_zero']:,} of {figures['monotone_solutions']:,} "
        f"solutions with monotone counts, {figures['rollouts_of_bisect_to_sweep']:.1%} of the rollouts (bound "
        f"{figures['bound']:.1%})"
    )
    write_json(config.output, **figures)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(EstimatesConfig, main))
