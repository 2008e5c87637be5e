"""Outcomes to rows: stepwise rows with counts, value rows of ReST-MCTS*, and trees of MATH-APS."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from cfprm_jax.config import EstimateConfig
from cfprm_jax.data import estimates
from cfprm_jax.data.estimates import RolloutCounts
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.labelling.inputs import InputSolution, Labelled
from cfprm_jax.labelling.rollouts import Outcome, Prefix
from cfprm_jax.labelling.tree import Node, SearchTree

_NUMBERED = re.compile(r"Step \d+\s*:")
_HARD = EstimateConfig(estimate="hard")
_VALUE = EstimateConfig(estimate="value", after_first_error="keep")


def solution_row(
    labelled: Labelled, solution: InputSolution, outcomes: Sequence[Outcome | None], policy: str
) -> dict[str, Any]:
    """The stepwise row of a solution.

    Args:
      outcomes: of every step but the last, whose count is whether the solution is correct.
    """
    known = solution.correct is not None
    successes = [
        *(None if one is None else one.successes for one in outcomes),
        int(solution.correct or 0) if known else None,
    ]
    rollouts = [*(None if one is None else one.verdicts for one in outcomes), 1 if known else None]
    remaining = [None if one is None else one.remaining for one in outcomes] + [0 if solution.correct else None]
    size = len(solution.steps)
    if solution.correct:
        # The solution itself is a continuation of each of its steps.
        remaining = [min(m, size - t) if m is not None else size - t for t, m in enumerate(remaining, 1)]
    lengths = [len(other.steps) for other in labelled.solutions if other.correct]
    counts = RolloutCounts(
        successes, rollouts, solution.correct, remaining, _both(labelled.rate), min(lengths, default=None)
    )
    return {**_stepwise(labelled.question, solution.steps, counts, policy), "candidate": solution.number}


def tree_rows(question: QuestionRow, tree: SearchTree, policy: str, edges: bool) -> Iterator[dict[str, Any]]:
    """Stepwise rows of a tree, all of one source.

    Args:
      edges: a row an edge, which has labels for the steps of the edge alone; otherwise a row a leaf, with all labels.
    """
    for number, node in enumerate(tree.edges() if edges else tree.leaves()):
        counts = _path_counts(tree, node, len(tree.parent(node.prefix).prefix) if edges else 0)
        yield {**_stepwise(question, node.prefix, counts, policy), "candidate": number}


def value_rows(question: QuestionRow, tree: SearchTree) -> Iterator[dict[str, Any]]:
    """Rows of ReST-MCTS*: every edge with the value of its end."""
    for node in tree.edges():
        labels = estimates.labels(_path_counts(tree, node, 0), _VALUE)
        value = labels[-1] if isinstance(labels, list) else None
        if value is not None:
            steps = [step if _NUMBERED.match(step) else f"Step {k}: {step}" for k, step in enumerate(node.prefix, 1)]
            text = "\n".join([f"Problem: {question.question}", "Solution:", *steps])
            yield {"prompt_answer": text, "label": value}


def math_aps_row(question: QuestionRow, tree: SearchTree, separator: str) -> dict[str, Any]:
    """A row of MATH-APS: the tree itself."""
    root: dict[str, Any] = {"text": "", "mc_value": tree.root.outcome.rate, "children": []}
    objects: dict[Prefix, dict[str, Any]] = {(): root}
    for node in tree.edges():
        parent = tree.parent(node.prefix).prefix
        text = separator.join(node.prefix[len(parent) :])
        objects[node.prefix] = {"text": text, "mc_value": node.outcome.rate, "children": []}
        objects[parent]["children"].append(objects[node.prefix])
    return {
        "question": question.question,
        "final_answer": question.answer,
        "reasoning_steps": root,
        "question_id": question.id,
    }


def _path_counts(tree: SearchTree, node: Node, context: int) -> RolloutCounts:
    prefixes = [node.prefix[:size] for size in range(1, len(node.prefix) + 1)]
    outcomes = [tree.nodes[prefix].outcome if prefix in tree.nodes else None for prefix in prefixes]
    root = tree.root.outcome
    return RolloutCounts(
        [None if one is None else one.successes for one in outcomes],
        [None if one is None else one.verdicts for one in outcomes],
        None,
        [tree.remaining(prefix) for prefix in prefixes],
        (root.successes, root.verdicts),
        tree.remaining(()),
        context,
    )


def _both(rate: tuple[int, int]) -> tuple[int | None, int | None]:
    return rate if rate[1] else (None, None)


def _stepwise(question: QuestionRow, steps: Sequence[str], counts: RolloutCounts, policy: str) -> dict[str, Any]:
    labels = estimates.labels(counts, _HARD)
    dataset = {} if question.dataset is None else {"dataset": question.dataset}
    context = {"context_steps": counts.context} if counts.context else {}
    return {
        "id": question.id,
        **dataset,
        "prompt": question.question,
        "completions": list(steps),
        "labels": labels,
        "successes": list(counts.successes),
        "rollouts": list(counts.rollouts),
        "remaining_steps": list(counts.remaining or ()),
        **context,
        "correct": counts.correct,
        "question_successes": counts.question[0],
        "question_rollouts": counts.question[1],
        "question_remaining_steps": counts.question_remaining,
        "answer": question.answer,
        "policy": policy,
        "source": f"{question.dataset}/{question.id}" if question.dataset else str(question.id),
    }
