"""Scored and graded candidates as arrays, which Best-of-N chooses from.

A candidate's step scores become one number by an aggregation: their minimum, the last, the product, or the mean. Where
the raw logits z are known, minimum and last rank by them and the product is the sum of log sigmoid(z), so that scores
which round to 1 are no ties. Without logits a product in which a score is 0 is 0: it ranks below every other product,
however small, and is a tie with every product that is 0. A candidate without scores (no steps, or too long) ranks
lowest and its question counts all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.data.candidates import Candidate, Question
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.aggregation import aggregate
from cfprm_jax.evaluation.costs import QuestionCost, question_cost
from cfprm_jax.grading.grader import Judgement

FIELDS = ("level", "subject", "perturbation_type")
"""Fields of a question's row, as MATH500 and GSM-Plus have them, by which accuracies are also given."""

NO_ANSWER_FIELD = "no_answer"
"""Marks a question whose reference answer is "None": the critical-thinking ones of GSM-Plus."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The candidates of all questions as arrays, padded to the largest number of candidates.

    Attributes:
      ids: the question of each line of the arrays.
      datasets: the data set that it belongs to; "" where it is not named.
      sources: its file and line.
      present: whether there is such a candidate.
      correct: whether it is right.
      group: which candidates of a question give the same answer; -1 for none.
      ranks: for each aggregation what candidates are ordered by; -inf where there is no score.
      weights: for each aggregation the score itself, in [0, 1]; 0 where there is none.
      steps: number of steps of each candidate.
      characters: length of its text, or steps.
      fields: values of FIELDS in the row of each question.
      costs: cost of each question, None without one.
      unscored: candidates without a score.
      split: counts of candidates with a text and no steps, by the number of their scores.
    """

    ids: tuple[str | int, ...]
    datasets: tuple[str, ...]
    sources: tuple[str, ...]
    present: Bool[np.ndarray, "questions candidates"]
    correct: Bool[np.ndarray, "questions candidates"]
    group: Int[np.ndarray, "questions candidates"]
    ranks: dict[str, Float[np.ndarray, "questions candidates"]]
    weights: dict[str, Float[np.ndarray, "questions candidates"]]
    steps: Int[np.ndarray, "questions candidates"]
    characters: Int[np.ndarray, "questions candidates"]
    fields: tuple[dict[str, str], ...]
    costs: tuple[QuestionCost | None, ...]
    unscored: int
    split: SplitCounts

    @property
    def sizes(self) -> Int[np.ndarray, " questions"]:
        """Number of candidates of each question."""
        return self.present.sum(axis=1)

    @property
    def has_costs(self) -> bool:
        """Whether the rows have costs. UserError if some have none."""
        missing = [source for source, cost in zip(self.sources, self.costs, strict=True) if cost is None]
        if missing and len(missing) < len(self.costs):
            raise UserError(f'{missing[0]} has no "cost", and other rows have one')
        return not missing


def make_pool(judged: Iterable[tuple[Question, Judgement]], aggregations: Sequence[str]) -> Pool:
    """The arrays of graded candidates, read as a stream.

    Raises:
      UserError: no question at all, or a candidate that was never scored.
    """
    ids, datasets, sources, fields, costs, unscored = [], [], [], [], [], 0
    correct, group, aggregated, steps, characters = [], [], [], [], []
    split = SplitCounts()
    for question, judgement in judged:
        for number, candidate in enumerate(question.candidates):
            if not candidate.was_scored:
                raise UserError(
                    f'{question.source}: candidate {number} has no "step_scores": run python -m cfprm_jax.score first'
                )
            unscored += candidate.step_scores is None or not len(candidate.step_scores)
            if candidate.steps is None:
                split.add(candidate.text or "", () if candidate.step_scores is None else candidate.step_scores)
        ids.append(question.id)
        datasets.append(question.dataset or "")
        sources.append(question.source)
        fields.append(question_fields(question))
        costs.append(question_cost(question.row, question.source))
        correct.append(judgement.correct)
        group.append(judgement.group)
        aggregated.append(aggregate(question.candidates, aggregations, question.source))
        steps.append(np.array([_number_of_steps(candidate) for candidate in question.candidates]))
        characters.append(np.array([_characters(candidate) for candidate in question.candidates]))
    if not ids:
        raise UserError("there are no questions to choose candidates for")
    return Pool(
        ids=tuple(ids),
        datasets=tuple(datasets),
        sources=tuple(sources),
        fields=tuple(fields),
        costs=tuple(costs),
        present=_padded([np.ones(len(c), bool) for c in correct], False),
        correct=_padded(correct, False),
        group=_padded(group, -1),
        ranks={name: _padded([a[name][0] for a in aggregated], -np.inf) for name in aggregations},
        weights={name: _padded([a[name][1] for a in aggregated], 0.0) for name in aggregations},
        steps=_padded(steps, 0),
        characters=_padded(characters, 0),
        unscored=unscored,
        split=split,
    )


def _number_of_steps(candidate: Candidate) -> int:
    if candidate.step_scores is not None:
        return len(candidate.step_scores)
    return len(candidate.steps or ())


def _characters(candidate: Candidate) -> int:
    return len(candidate.text) if candidate.text else sum(map(len, candidate.steps or ()))


def _padded(lines: Sequence[np.ndarray], fill: float) -> np.ndarray:
    out = np.full((len(lines), max(map(len, lines))), fill, dtype=lines[0].dtype)
    for line, values in zip(out, lines, strict=True):
        line[: len(values)] = values
    return out


def question_fields(question: Question) -> dict[str, str]:
    """Those of FIELDS that a question's row has, as text, and NO_ANSWER_FIELD where its reference answer is "None"."""
    out = {name: str(question.row[name]) for name in FIELDS if isinstance(question.row.get(name), str | int)}
    if question.answer.strip() == "None":
        out[NO_ANSWER_FIELD] = "true"
    return out
