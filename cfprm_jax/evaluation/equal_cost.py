"""A search against Best-of-N at equal cost: how many independent solutions the same FLOPs buy.

A search is worth its cost only where it beats Best-of-N of equal cost, which it often does not (2510.20272). A question
costs 2 FLOPs a parameter and processed token, of policy and PRM. For n of the N solutions of a question, Best-of-N
would have sampled and scored the share n / N of its tokens; the prompt is processed once in any case.

The accuracy of Best-of-n is its expectation over all subsets of n of the N solutions, without drawing any: the solution
at place k of the ranking, from 0, is the best of a subset with probability C(N - 1 - k, n - 1) / C(N, n). So the order
of solutions in the file, which search sorts by score, does not matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.costs import PARAMETERS, QuestionCost
from cfprm_jax.evaluation.pool import Pool
from cfprm_jax.evaluation.statistics import bootstrap_interval, paired_p_value


@dataclasses.dataclass(frozen=True)
class EqualCost:
    """One aggregation of the comparison.

    Attributes:
      aggregation: of the step scores.
      n: solutions of Best-of-N a question.
      flops, flops2: mean cost of a question, of the search and of Best-of-n.
      accuracy, accuracy2: of the best solution by the aggregation.
      difference, ci95, p_value: search minus Best-of-n, paired by question.
    """

    aggregation: str
    n: int
    flops: float
    flops2: float
    accuracy: float
    accuracy2: float
    difference: float
    ci95: tuple[float, float]
    p_value: float


def flops(
    pool: Pool, parameters: tuple[float, float], share: Float[np.ndarray, " questions"] | float = 1.0
) -> np.ndarray:
    """FLOPs of each question.

    Args:
      pool: with costs.
      parameters: of policy and PRM.
      share: of the sampled and scored tokens that is computed; prompts of the policy are whole.
    """
    policy, reward, sampled = (
        np.array([getattr(cost, name) for cost in pool.costs], np.float64)
        for name in ("policy_tokens", "reward_tokens", "sampled_tokens")
    )
    return 2 * (parameters[0] * (policy - sampled + share * sampled) + parameters[1] * share * reward)


def expected_best(
    ranks: Float[np.ndarray, "questions candidates"], correct: np.ndarray, present: np.ndarray, n: int
) -> Float[np.ndarray, " questions"]:
    """The probability that the highest of n random candidates, the first in file order on a tie, is right."""
    found = np.zeros(len(ranks))
    for place, (rank, right, there) in enumerate(zip(ranks, correct, present, strict=True)):
        size = int(there.sum())
        order = np.argsort(-rank[:size], kind="stable")
        places = np.arange(size - 1)
        # C(N - 2 - k, n - 1) / C(N - 1 - k, n - 1), from one place to the next.
        chance = n / size * np.cumprod([1.0, *np.maximum(size - n - places, 0) / (size - 1 - places)])
        found[place] = chance @ right[:size][order]
    return found


def compare(
    search: Pool, best_of_n: Pool, parameters: tuple[float, float], resamples: int, seed: int
) -> list[EqualCost]:
    """The best of all solutions of the search against Best-of-n for the largest n that costs no more.

    Where that is more than Best-of-N has solutions, n is all of them, and its cost the lower one.

    Args:
      best_of_n: the same questions in the same order.
      parameters: of policy and PRM; 0 takes those of the rows.

    Raises:
      UserError: parameters are neither given nor in the rows, or the second system is not Best-of-N.
    """
    sizes = _parameters([*search.costs, *best_of_n.costs], parameters)
    if any(cost is not None and cost.discarded_tokens for cost in best_of_n.costs):
        raise UserError(
            "--input2 has discarded tokens in its costs, so it is a search: expected independent solutions, best_of_n"
        )
    own = flops(search, sizes)
    totals = best_of_n.sizes
    n, cheaper = 1, flops(best_of_n, sizes, 1 / totals)
    for number in range(2, int(totals.min()) + 1):
        cost = flops(best_of_n, sizes, number / totals)
        if cost.mean() > own.mean():
            break
        n, cheaper = number, cost
    out = []
    for name, ranks in search.ranks.items():
        best = ranks.argmax(axis=1)[:, None]
        one = np.take_along_axis(search.correct, best, axis=1)[:, 0].astype(np.float64)
        two = expected_best(best_of_n.ranks[name], best_of_n.correct, best_of_n.present, n)
        difference = (one - two)[:, None]
        low, high = bootstrap_interval(difference, resamples, seed)[0]
        out.append(
            EqualCost(
                aggregation=name,
                n=n,
                flops=float(own.mean()),
                flops2=float(cheaper.mean()),
                accuracy=float(one.mean()),
                accuracy2=float(two.mean()),
                difference=float(difference.mean()),
                ci95=(float(low), float(high)),
                p_value=float(paired_p_value(difference, resamples, seed)[0]),
            )
        )
    return out


def _parameters(costs: Sequence[QuestionCost | None], given: tuple[float, float]) -> tuple[float, float]:
    """Parameters of policy and PRM: those given, or those of all rows."""
    found = []
    for name, value in zip(PARAMETERS, given, strict=True):
        counts = {getattr(cost, name) for cost in costs}
        if not value and (None in counts or len(counts) > 1):
            what = "rows without it" if None in counts else f"different ones: {', '.join(map(str, sorted(counts)))}"
            raise UserError(f'--{name} is required, because the "cost" of the rows has {what}')
        found.append(value or counts.pop())
    return found[0], found[1]
