"""Best-of-N: choose one of n candidates of every question, by a PRM's step scores or by vote, and count right choices.

A candidate's step scores become one number by an aggregation: their minimum, the last, the product, or the mean. Where
the raw logits z are known, minimum and last rank by them and the product is the sum of log sigmoid(z), so that scores
which round to 1 are no ties. A candidate without scores (no steps, or too long) ranks lowest and its question counts
all the same. The highest is chosen, the first in file order on a tie.

Beside it: the weighted vote (the answer whose candidates' aggregated scores add up to most), the majority vote, pass@1
(the mean over the whole pool), the first candidate, and the oracle (whether any of the n is right). A vote's answer is
right iff the first of its candidates is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.answers import grade, groups
from cfprm_jax.evaluation.candidates import Candidate, Question
from cfprm_jax.evaluation.statistics import bootstrap_interval

# Below every score but 0: a logarithm of 0 would be the rank of a candidate without scores.
_SMALLEST = np.finfo(np.float64).smallest_subnormal

METHODS = ("best_of_n", "weighted_vote", "majority", "pass_at_1", "first", "oracle")


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The candidates of all questions as arrays, padded to the largest number of candidates.

    Attributes:
      ids: the question of each line of the arrays.
      present: whether there is such a candidate.
      correct: whether it is right.
      group: which candidates of a question give the same answer; -1 for none.
      ranks: for each aggregation what candidates are ordered by; -inf where there is no score.
      weights: for each aggregation the score itself, in [0, 1]; 0 where there is none.
      unscored: candidates without a score.
    """

    ids: tuple[str | int, ...]
    present: Bool[np.ndarray, "questions candidates"]
    correct: Bool[np.ndarray, "questions candidates"]
    group: Int[np.ndarray, "questions candidates"]
    ranks: dict[str, Float[np.ndarray, "questions candidates"]]
    weights: dict[str, Float[np.ndarray, "questions candidates"]]
    unscored: int

    @property
    def sizes(self) -> Int[np.ndarray, " questions"]:
        """Number of candidates of each question."""
        return self.present.sum(axis=1)


@dataclasses.dataclass(frozen=True)
class Row:
    """One accuracy, as a row of results.json.

    Attributes:
      n: number of candidates that are chosen from.
      method: one of METHODS.
      aggregation: of the step scores; None where there is none.
      accuracy: share of questions answered right, 0 to 1; with draws its mean over them.
      ci95: 95 % interval from a bootstrap over questions.
      draws: random subsets of n candidates; 0 is the first n in file order, or a method that draws none.
      draw_std: standard deviation of the accuracy over draws; None without draws.
    """

    n: int
    method: str
    aggregation: str | None
    accuracy: float
    ci95: tuple[float, float]
    draws: int
    draw_std: float | None


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
      UserError: some scored candidates have logits and some have none, so that they cannot be compared.
    """
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
        order, log_p, score = p, np.log(np.maximum(p, _SMALLEST)), lambda rank: rank
    for name, (ranks, weights) in out.items():
        if name == "min":
            ranks[scored] = np.minimum.reduceat(order, starts)
            weights[scored] = score(ranks[scored])
        elif name == "last":
            ranks[scored] = order[starts + lengths - 1]
            weights[scored] = score(ranks[scored])
        elif name == "product":
            ranks[scored] = np.add.reduceat(log_p, starts)
            weights[scored] = np.exp(ranks[scored])
        else:
            ranks[scored] = np.add.reduceat(p, starts) / lengths
            weights[scored] = ranks[scored]
    return out


def make_pool(questions: Iterable[Question], aggregations: Sequence[str], grader: str) -> Pool:
    """The arrays of a candidates file, read as a stream.

    Raises:
      UserError: no question at all, a candidate that was never scored, or what the grader raises.
    """
    ids, correct, group, aggregated, unscored = [], [], [], [], 0
    for question in questions:
        for number, candidate in enumerate(question.candidates):
            if not candidate.was_scored:
                raise UserError(
                    f'{question.source}: candidate {number} has no "step_scores": run python -m cfprm_jax.score first'
                )
            unscored += candidate.step_scores is None or not len(candidate.step_scores)
        ids.append(question.id)
        correct.append(grade(question, grader))
        group.append(groups(question.candidates))
        aggregated.append(aggregate(question.candidates, aggregations, question.source))
    if not ids:
        raise UserError("there are no questions to choose candidates for")
    return Pool(
        ids=tuple(ids),
        present=_padded([np.ones(len(c), bool) for c in correct], False),
        correct=_padded(correct, False),
        group=_padded(group, -1),
        ranks={name: _padded([a[name][0] for a in aggregated], -np.inf) for name in aggregations},
        weights={name: _padded([a[name][1] for a in aggregated], 0.0) for name in aggregations},
        unscored=unscored,
    )


def _padded(lines: Sequence[np.ndarray], fill: float) -> np.ndarray:
    out = np.full((len(lines), max(map(len, lines))), fill, dtype=lines[0].dtype)
    for line, values in zip(out, lines, strict=True):
        line[: len(values)] = values
    return out


def _pick(values: np.ndarray, subset: Int[np.ndarray, "questions n"]) -> np.ndarray:
    return np.take_along_axis(values, subset, axis=1)


def _best(rank: Float[np.ndarray, "questions n"], correct: Bool[np.ndarray, "questions n"]) -> np.ndarray:
    """Whether the highest candidate, the first on a tie, is right."""
    return np.take_along_axis(correct, rank.argmax(axis=1)[:, None], axis=1)[:, 0]


def _vote(
    weight: Float[np.ndarray, "questions n"],
    group: Int[np.ndarray, "questions n"],
    correct: Bool[np.ndarray, "questions n"],
) -> np.ndarray:
    """Whether the answer with most weight, the one given first on a tie, is right; never without any answer."""
    questions, answers = len(group), int(group.max(initial=0)) + 1
    cell = np.arange(questions)[:, None] * answers + np.maximum(group, 0)
    answered = group >= 0
    totals = np.bincount(cell[answered], weight[answered], minlength=questions * answers)
    # Every candidate carries its answer's total, so that the first of the highest also settles ties.
    rank = np.where(answered, totals[cell], -1.0)
    return _best(rank, correct & answered)


def subsets(
    sizes: Int[np.ndarray, " questions"], n: Sequence[int], draws: int, seed: int
) -> Iterator[dict[int, np.ndarray]]:
    """The candidates to choose from: for each draw, for each n, int [questions, n] in file order.

    Args:
      sizes: number of candidates of each question.
      n: none larger than the smallest of sizes.
      draws: number of random subsets, of which that of a smaller n lies within that of a larger one; 0 gives the first
        n, once.
      seed: of the draws.
    """
    width = int(sizes.max())
    order = np.tile(np.arange(width), (len(sizes), 1))
    if not draws:
        yield {size: order[:, :size] for size in n}
        return
    rng = np.random.default_rng(seed)
    absent = order >= sizes[:, None]
    for _ in range(draws):
        shuffled = np.argsort(np.where(absent, 2.0, rng.random(order.shape)), axis=1)
        yield {size: np.sort(shuffled[:, :size], axis=1) for size in n}


def check_sizes(pool: Pool, n: Sequence[int]) -> None:
    """UserError if a question has fewer candidates than the largest n."""
    smallest = int(pool.sizes.argmin())
    if max(n) > pool.sizes[smallest]:
        raise UserError(
            f"--n={max(n)}: question {pool.ids[smallest]!r} has only {pool.sizes[smallest]} candidates, "
            "and every question needs as many as the largest n"
        )


def evaluate(pool: Pool, n: Sequence[int], draws: int, seed: int, resamples: int) -> list[Row]:
    """The accuracy of every method at every n, with its interval.

    The pool's aggregations are evaluated in their order. pass_at_1 and first do not depend on n, and stand at every n
    for comparison.

    Args:
      draws: number of random subsets of n candidates; 0 takes the first n.
      seed: of the draws and of the bootstrap.
      resamples: of the bootstrap.

    Raises:
      UserError: n is larger than the smallest number of candidates.
    """
    check_sizes(pool, n)
    drawn: dict[tuple[int, str, str | None], list[np.ndarray]] = {}
    for subset_of in subsets(pool.sizes, n, draws, seed):
        for size, subset in subset_of.items():
            correct, group = _pick(pool.correct, subset), _pick(pool.group, subset)
            for name in pool.ranks:
                best = _best(_pick(pool.ranks[name], subset), correct)
                weighted = _vote(_pick(pool.weights[name], subset), group, correct)
                drawn.setdefault((size, "best_of_n", name), []).append(best)
                drawn.setdefault((size, "weighted_vote", name), []).append(weighted)
            drawn.setdefault((size, "majority", None), []).append(_vote(np.ones(subset.shape), group, correct))
            drawn.setdefault((size, "oracle", None), []).append(np.asarray(correct.any(axis=1)))
    outcomes = {key: np.mean(values, axis=0) for key, values in drawn.items()}
    for size in n:
        outcomes[size, "pass_at_1", None] = pool.correct.sum(axis=1) / pool.sizes
        outcomes[size, "first", None] = pool.correct[:, 0].astype(np.float64)
    keys = sorted(outcomes, key=lambda key: (n.index(key[0]), METHODS.index(key[1])))
    intervals = bootstrap_interval(np.stack([outcomes[key] for key in keys], axis=1), resamples, seed)
    return [
        Row(
            n=size,
            method=method,
            aggregation=name,
            accuracy=float(outcomes[size, method, name].mean()),
            ci95=(float(low), float(high)),
            draws=draws if (size, method, name) in drawn else 0,
            draw_std=(
                float(np.std([values.mean() for values in drawn[size, method, name]]))
                if draws and (size, method, name) in drawn
                else None
            ),
        )
        for (size, method, name), (low, high) in zip(keys, intervals, strict=True)
    ]
