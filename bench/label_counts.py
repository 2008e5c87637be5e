"""Whether two programs count alike: the rows that `label` wrote with one policy on two engines, paired step by step.

    python bench/label_counts.py --first=rolled_vllm.jsonl --second=rolled_local.jsonl --output=label_counts.json

The two must be of the same solutions. Figures, over the steps that both rolled:

- the mean difference of success rates, with a 95 % interval (bootstrap over questions), which finds an engine that is
  better or worse on the whole;
- the mean squared difference of counts, in units of its variance where both engines sample from one distribution
  (given a step's successes of both, the first engine's are hypergeometric): 1 if they do, above 1 if steps differ in
  either direction. Its p-value is of a permutation test, which deals each step's rollouts to the engines anew.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np
from common import write_json

from cfprm_jax import flags
from cfprm_jax.config import LARGEST_SEED
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class CountsConfig(Options):
    """Success counts of two engines, paired by step."""

    first: str = option("", "Stepwise rows that label wrote.")
    second: str = option("", "Those of the other engine.")
    draws: int = option(100_000, "Number of permutations and of bootstrap samples.", lower=100, upper=10**7)
    seed: int = option(0, "Random seed.", lower=0, upper=LARGEST_SEED)
    output: str = option("", "JSON file for the figures, besides standard output; empty is none.")


Counts = dict[tuple[str, tuple[str, ...]], tuple[int, int]]


def read_counts(path: str) -> Counts:
    """(question, steps so far) -> (successes, rollouts) of the prefixes that were rolled."""
    found: Counts = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for size in range(1, len(row["completions"])):  # the last step is the solution itself
            successes, rollouts = row["successes"][size - 1], row["rollouts"][size - 1]
            if successes is not None and rollouts:
                found[row["prompt"], tuple(row["completions"][:size])] = successes, rollouts
    return found


def compare(first: Counts, second: Counts, draws: int, seed: int) -> dict[str, Any]:
    """The figures of the module's docstring.

    Raises:
      UserError: no step was rolled by both.
    """
    both = sorted(first.keys() & second.keys())
    if not both:
        raise UserError("no step was rolled by both engines")
    (s1, n1), (s2, n2) = (np.array([counts[key] for key in both]).T for counts in (first, second))
    rng = np.random.default_rng(seed)
    difference = s1 / n1 - s2 / n2
    questions = np.unique([question for question, _ in both], return_inverse=True)[1]
    sums, sizes = np.bincount(questions, difference), np.bincount(questions)
    resampled = rng.integers(len(sums), size=(draws, len(sums)))
    means = sums[resampled].sum(axis=1) / sizes[resampled].sum(axis=1)

    total, successes = n1 + n2, s1 + s2
    expected = n1 * successes / total
    variance = expected * (1 - successes / total) * n2 / (total - 1)
    varied = variance > 0  # where all or none succeeded, no dealing differs
    dealt = rng.hypergeometric(successes, total - successes, n1, size=(draws, len(both)))

    def dispersion(counts: np.ndarray) -> np.ndarray:
        return (np.square(counts - expected)[..., varied] / variance[varied]).mean(axis=-1)

    return {
        "steps": len(both),
        "steps_of_one_only": len(first.keys() ^ second.keys()),
        "questions": len(sums),
        "rollouts": [int(n1.sum()), int(n2.sum())],
        "success_rates": [float((s1 / n1).mean()), float((s2 / n2).mean())],
        "mean_difference": float(difference.mean()),
        "ci95": np.quantile(means, [0.025, 0.975]).tolist(),
        "mean_difference_p": _p(abs(difference.mean()), abs((dealt / n1 - (successes - dealt) / n2).mean(axis=1))),
        "steps_with_both_outcomes": int(varied.sum()),
        "dispersion": float(dispersion(s1)) if varied.any() else None,
        "dispersion_p": _p(dispersion(s1), dispersion(dealt)) if varied.any() else None,
        "correlation": float(np.corrcoef(s1 / n1, s2 / n2)[0, 1]) if s1.std() and s2.std() else None,
        "same_hard_label": float(((s1 > 0) == (s2 > 0)).mean()),
    }


def _p(observed: float, dealt: np.ndarray) -> float:
    """Share of the permutations at least as far out, the observed one among them."""
    return float((1 + (dealt >= observed - 1e-12).sum()) / (1 + len(dealt)))


def main(config: CountsConfig) -> int:
    """Prints the figures."""
    figures = compare(read_counts(config.first), read_counts(config.second), config.draws, config.seed)
    print(json.dumps(figures, indent=1))
    write_json(config.output, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(CountsConfig, main))
