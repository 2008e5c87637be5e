"""MATH-APS: the trees of an OmegaPRM search, whole or flat, a question a row.

    {"question", "final_answer", "reasoning_steps": {"text", "mc_value", "children": [...]}, "question_id"}
    {"question", "final_answer", "reasoning_steps": [{"solution_prefix", "mc_value"}, ...], "question_id"}

"mc_value" is the rate of successful rollouts from the end of the node's text, a soft label in [0, 1]. The root's text
is empty, or the question. A tree becomes one trajectory an edge, which has the label of its last step alone, so that
every rate counts once; a flat row becomes one trajectory a prefix, of one step. Steps are stripped. The trajectories of
a row are one record. With an --estimate the rates take the place of counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cfprm_jax.data import estimates
from cfprm_jax.data.estimates import RolloutCounts
from cfprm_jax.data.formats import fields
from cfprm_jax.data.formats.fields import Label, ParseOptions, Solution
from cfprm_jax.data.formats.grouping import RowIsRecord
from cfprm_jax.errors import UserError

NAME = "math_aps"
GROUPING = RowIsRecord
FIELDS = ("question", "reasoning_steps")
_DEEPEST = 10_000


def matches(row: dict[str, Any]) -> bool:
    """Whether a row is of this format."""
    return all(name in row for name in FIELDS)


def parse(row: dict[str, Any], options: ParseOptions) -> list[Solution]:
    """The edges of a tree, in depth-first order, or the prefixes of a flat row.

    Raises:
      UserError: a field is missing or invalid.
    """
    question = fields.text(row, "question")
    answer, name = fields.optional_text(row, "final_answer"), fields.optional_text(row, "question_id")
    steps = fields.require(row, "reasoning_steps")
    if isinstance(steps, list):
        paths = [_prefix(entry, number) for number, entry in enumerate(steps, 1)]
        base: Label = None
    elif isinstance(steps, dict):
        paths, base = list(_edges(steps, question)), _rate(steps, "the root") if "mc_value" in steps else None
    else:
        raise UserError(f"field 'reasoning_steps': expected an object or a list, found {steps!r:.80}")
    found = []
    for texts, rates in paths:
        labels = _labels(rates, base, options)
        if labels is not None:
            found.append(Solution(question, texts, labels, name, answer))
    return found


def _labels(rates: list[Label], base: Label, options: ParseOptions) -> list[Label] | None:
    context = len(rates) - 1
    if options.estimates.estimate == "labels":
        return [*[None] * context, rates[-1]]
    if options.estimates.hard_threshold > 1:
        raise UserError("--hard_threshold counts successes, and a row of math_aps has rates only")
    known = [None if rate is None else 1 for rate in rates]
    counts = RolloutCounts(rates, known, question=(base, None if base is None else 1), context=context)
    derived = estimates.labels(counts, options.estimates)
    if isinstance(derived, str):
        options.leave_out(derived)
        return None
    return derived


def _prefix(entry: Any, number: int) -> tuple[list[str], list[Label]]:
    if not isinstance(entry, dict):
        raise UserError(f"field 'reasoning_steps': entry {number}: expected an object, found {entry!r:.80}")
    return [fields.text(entry, "solution_prefix").strip()], [_rate(entry, f"entry {number}")]


def _edges(root: dict[str, Any], question: str) -> Iterator[tuple[list[str], list[Label]]]:
    """Texts and rates of the path to every node that has a text, depth first."""
    waiting: list[tuple[dict[str, Any], list[str], list[Label]]] = [(root, [], [])]
    while waiting:
        node, texts, rates = waiting.pop()
        text = fields.text(node, "text").strip()
        if text and not (node is root and text == question.strip()):
            texts, rates = [*texts, text], [*rates, _rate(node, f"the node {text!r:.40}")]
            yield texts, rates
        if len(texts) > _DEEPEST:
            raise UserError(f"field 'reasoning_steps': a path of more than {_DEEPEST:,} nodes")
        children = node.get("children") or []
        if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
            raise UserError(f"field 'children': expected a list of objects, found {children!r:.80}")
        waiting += [(child, texts, rates) for child in reversed(children)]


def _rate(node: dict[str, Any], where: str) -> Label:
    value = node.get("mc_value")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"field 'mc_value' of {where}: expected a number in [0, 1] or null, found {value!r:.80}")
    return float(value)
