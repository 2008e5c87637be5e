"""What label.json has about the labels: zeros, first errors, violations of monotonicity, and the cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.labelling.inputs import InputSolution
from cfprm_jax.labelling.rollouts import Outcome
from cfprm_jax.labelling.tree import SearchTree


@dataclasses.dataclass
class Summary:
    """Totals over solutions and trees.

    Attributes:
      steps_rolled, zeros: steps with counts before a solution's last, and those of them without a success.
      first_errors: sum of the places, from 1, of the first errors of solutions that have one.
      violations: solutions or trees with a success after a step without one, which bisect and tree assume there are
        none of.
      violating_steps: those successes.
      correct_with_zeros: correct solutions with a rolled step without a success.
      split: of solutions given as text, and of the first rollouts of a tree.
      rollouts_of_a_full_sweep: rollouts that a sweep of every step of everything would take.
    """

    questions: int = 0
    omitted_questions: int = 0
    solutions: int = 0
    right: int = 0
    unknown: int = 0
    single_steps: int = 0
    rows: int = 0
    steps_rolled: int = 0
    zeros: int = 0
    erring: int = 0
    first_errors: int = 0
    violations: int = 0
    violating_steps: int = 0
    correct_with_zeros: int = 0
    searches: int = 0
    nodes: int = 0
    split: SplitCounts = dataclasses.field(default_factory=SplitCounts)
    rollouts_of_a_full_sweep: int = 0

    def add_solution(self, solution: InputSolution, outcomes: Sequence[Outcome | None], rollouts: int) -> None:
        """Count a solution."""
        self.solutions += 1
        self.right += solution.correct is True
        self.unknown += solution.correct is None
        self.single_steps += not outcomes
        self.rollouts_of_a_full_sweep += rollouts * len(outcomes)
        counts = [None if one is None else one.successes for one in outcomes]
        known = [count for count in counts if count is not None]
        self.steps_rolled += len(known)
        self.zeros += known.count(0)
        self.correct_with_zeros += solution.correct is True and 0 in known
        every = [*counts, None if solution.correct is None else int(solution.correct)]
        error = next((place for place, count in enumerate(every, 1) if count == 0), None)
        if error is not None:
            self.erring += 1
            self.first_errors += error
            later = sum(1 for count in every[error:] if count)
            self.violating_steps += later
            self.violations += later > 0

    def add_tree(self, tree: SearchTree, rollouts: int) -> None:
        """Count a tree; a sweep would roll every piece of each rollout that was searched."""
        self.searches += len(tree.selected)
        self.nodes += len(tree.nodes)
        violating = tree.violations()
        self.violating_steps += violating
        self.violations += violating > 0
        self.rollouts_of_a_full_sweep += rollouts * (1 + sum(max(selected.pieces - 1, 0) for selected in tree.selected))
        for node in tree.nodes.values():
            if node.prefix and node.outcome.successes is not None and not node.end:
                self.steps_rolled += 1
                self.zeros += node.wrong

    def as_dict(self, rolled: int) -> dict[str, Any]:
        """For label.json, with the rollouts that were made."""
        full = self.rollouts_of_a_full_sweep
        return {
            **dataclasses.asdict(self),
            "share_of_zeros": self.zeros / self.steps_rolled if self.steps_rolled else None,
            "mean_first_error": self.first_errors / self.erring if self.erring else None,
            "cost_against_a_full_sweep": rolled / full if full else None,
        }
