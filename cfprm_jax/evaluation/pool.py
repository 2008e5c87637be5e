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

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.candidates import Candidate, Question
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.costs import QuestionCost, question_cost
from cfprm_jax.grading.grader import Judgement

FIELDS = ("level", "subject", "perturbation_type")
"""Fields of a question's row, as MATH500 and GSM-Plus have them, by which accuracies are also given."""

NO_ANSWER_FIELD = "no_answer"
"""Marks a question whose reference answer is "None": the critical-thinking ones of GSM-Plus."""

# Below every sum of logarithms: the logarithm of 0 would be the rank of a candidate without scores.
_LOG_OF_ZERO = -np.finfo(np.float64).max


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


def log_sigmoid(z: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """log sigmoid(z) in float64, finite for every finite z."""
    return -np.logaddexp(0.0, -z)


def aggregate(
    candidates: Sequence[Candidate], aggregations: Sequence[str], where: str
) -> dict[str, tuple[Float[np.ndarray, " candidates"], Float[np.ndarray, " candidates"]]]:
    """What each aggregation makes of a question's candidates: (what they are ordered by, the score in [0, 1]).

    Without scores that is -inf and 0.

    Args:
      where: file and line of the question, for messages.

    Raises:
      UserError: some scored candidates have logits and some have none, so that they cannot be compared; or an
        aggregation that is none of AGGREGATIONS.
    """
    if unknown := sorted(set(aggregations) - set(AGGREGATIONS)):
        raise UserError(f"aggregation {unknown[0]!r} is none of {', '.join(AGGREGATIONS)}")
    scored = np.array([c.step_scores is not None and len(c.step_scores) > 0 for c in candidates])
    logits = np.array([c.step_logits is not None for c in candidates]) & scored
    if logits.any() and not logits[scored].all():
        missing, other = np.flatnonzero(scored & ~logits)[0], np.flatnonzero(logits)[0]
        raise UserError(f'{where}: candidate {missing} has no "step_logits", but candidate {other} has')
    out = {name: (np.full(len(candidates), -np.inf), np.zeros(len(candidates))) for name in aggregations}
    if not scored.any():
        return out
    scores = [c.step_scores for c, has in zip(candidates, scored, strict=True) if has and c.step_scores is not None]
    lengths = np.array([len(s) for s in scores])
    starts = np.cumsum(lengths) - lengths
    p = np.concatenate(scores)
    if logits.any():
        z = np.concatenate([c.step_logits for c in candidates if c.step_logits is not None and len(c.step_logits)])
        order, log_p, score = z, log_sigmoid(z), lambda rank: np.exp(log_sigmoid(rank))
    else:
        order, log_p, score = p, np.log(np.where(p > 0, p, 1.0)), lambda rank: rank
    zero = np.logical_or.reduceat(p <= 0, starts) & ~logits.any()
    for name, (ranks, weights) in out.items():
        if name == "min":
            ranks[scored] = np.minimum.reduceat(order, starts)
            weights[scored] = score(ranks[scored])
        elif name == "last":
            ranks[scored] = order[starts + lengths - 1]
            weights[scored] = score(ranks[scored])
        elif name == "product":
            ranks[scored] = np.where(zero, _LOG_OF_ZERO, np.add.reduceat(log_p, starts))
            weights[scored] = np.exp(ranks[scored])
        else:
            ranks[scored] = np.add.reduceat(p, starts) / lengths
            weights[scored] = ranks[scored]
    return out


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
