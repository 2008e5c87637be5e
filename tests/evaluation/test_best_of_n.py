"""Best-of-N against published figures, a plain implementation, and by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.candidates import Candidate, Question, read_candidates
from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.best_of_n import chosen, majority, outcomes, rows, subsets
from cfprm_jax.evaluation.pool import make_pool
from cfprm_jax.grading.grader import Grader


def candidate(scores, correct=False, predicted="x", logits=None):
    return Candidate(
        text="",
        step_scores=None if scores is None else np.asarray(scores, np.float64),
        step_logits=None if logits is None else np.asarray(logits, np.float64),
        predicted=predicted,
        correct=correct,
        was_scored=True,
    )


def question(*candidates, name="q"):
    return Question(name, "?", "x", candidates, f"c.jsonl:{name}")


def pool_of(questions, aggregations=AGGREGATIONS):
    return make_pool(Grader("none").judge(questions), aggregations)


def evaluate(pool, n, draws, seed, resamples):
    """The rows over all questions."""
    everything = np.ones((1, len(pool.ids)), bool)
    return rows(outcomes(pool, n, draws, seed, everything), everything, 0, resamples, seed)


def accuracies(questions, n=(1,), draws=0, seed=0, aggregations=AGGREGATIONS):
    found = evaluate(pool_of(questions, aggregations), n, draws, seed, 200)
    return {(row.n, row.method, row.aggregation): row.accuracy for row in found}


def test_published_candidates_give_the_published_accuracies(shared):
    folder = shared / "data" / "bon"
    expected = json.loads((folder / "expected_math500_first250.json").read_text())
    found = accuracies(read_candidates(folder / "math500_first250_qwen2.5-7b-instruct_n32.jsonl.gz"), (8, 16, 32))
    for n in (8, 16, 32):
        for name in AGGREGATIONS:
            key = f"best_of_{n} {name} (first {n} candidates, first wins a tie)"
            assert round(found[n, "best_of_n", name], 4) == expected[key]
    assert round(found[32, "pass_at_1", None], 4) == expected["pass@1 (mean over candidates)"]
    assert round(found[32, "oracle", None], 4) == expected["oracle@32"]


# --- a plain implementation, one question and one candidate at a time -------------------------------------------------


def sigmoid(z):
    return 1 / (1 + math.exp(-z)) if z > -700 else 0.0


def plain_rank(c, name):
    if c.step_scores is None or not len(c.step_scores):
        return -math.inf
    p, z = [float(v) for v in c.step_scores], c.step_logits
    if name == "mean":
        return statistics.fmean(p)
    if name == "product":
        return math.fsum(math.log(v) for v in p) if z is None else math.fsum(-math.log1p(math.exp(-v)) for v in z)
    values = p if z is None else z
    return min(values) if name == "min" else values[-1]


def plain_weight(c, name):
    rank = plain_rank(c, name)
    if rank == -math.inf:
        return 0.0
    if name == "product":
        return math.exp(rank)
    return sigmoid(rank) if c.step_logits is not None and name != "mean" else rank


def plain_vote(chosen, weights):
    totals = {}
    for c, weight in zip(chosen, weights, strict=True):
        if c.predicted is not None:
            totals[c.predicted] = totals.get(c.predicted, 0.0) + weight
    if not totals:
        return False
    best = max(totals, key=totals.get)  # a dict keeps the order of first appearance
    return next(c.correct for c in chosen if c.predicted == best)


def plain_accuracies(questions, n):
    out = {}
    for size in n:
        for name in AGGREGATIONS:
            best, vote = [], []
            for q in questions:
                chosen = q.candidates[:size]
                best.append(max(chosen, key=lambda c: plain_rank(c, name)).correct)  # the first on a tie
                vote.append(plain_vote(chosen, [plain_weight(c, name) for c in chosen]))
            out[size, "best_of_n", name] = statistics.fmean(best)
            out[size, "weighted_vote", name] = statistics.fmean(vote)
        out[size, "majority", None] = statistics.fmean(plain_vote(q.candidates[:size], [1.0] * size) for q in questions)
        out[size, "oracle", None] = statistics.fmean(any(c.correct for c in q.candidates[:size]) for q in questions)
        out[size, "first", None] = statistics.fmean(q.candidates[0].correct for q in questions)
        out[size, "pass_at_1", None] = statistics.fmean(
            statistics.fmean(c.correct for c in q.candidates) for q in questions
        )
    return out


# Few distinct values, exact in binary, so that ties are common and sums of them exact.
steps = st.lists(st.sampled_from([0.25, 0.5, 1.0]), max_size=3)


@st.composite
def pools(draw):
    with_logits = draw(st.booleans())
    questions = []
    for number in range(draw(st.integers(1, 4))):
        made = []
        for _ in range(draw(st.integers(3, 5))):
            scores = draw(st.none() | steps)
            logits = None
            if with_logits and scores:
                logits = [{0.25: -1.0, 0.5: 0.0, 1.0: 40.0}[p] for p in scores]
                scores = [sigmoid(z) for z in logits]
            made.append(candidate(scores, draw(st.booleans()), draw(st.sampled_from(["a", "b", "c", None])), logits))
        questions.append(question(*made, name=str(number)))
    return questions


@given(pools())
@settings(max_examples=150)
def test_it_agrees_with_a_plain_implementation(questions):
    found, expected = accuracies(questions, (1, 3)), plain_accuracies(questions, (1, 3))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-12), key


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_logits_break_the_ties_of_scores_that_round_to_one():
    sure, surer = candidate([1.0, 1.0], logits=[40.0, 50.0]), candidate([1.0, 1.0], True, logits=[45.0, 60.0])
    found = accuracies([question(sure, surer)], (2,))
    assert [found[2, "best_of_n", name] for name in AGGREGATIONS] == [1.0, 1.0, 1.0, 0.0]


def test_a_score_of_zero_is_above_no_score_and_an_unscored_question_counts():
    questions = [
        question(candidate(None), candidate([0.0], True), name="zero"),
        question(candidate(None, True), candidate([]), name="none"),
        question(candidate(None), candidate([], True), name="wrong"),
    ]
    found = accuracies(questions, (2,))
    assert all(found[2, "best_of_n", name] == pytest.approx(2 / 3) for name in AGGREGATIONS)
    assert pool_of(questions, ("min",)).unscored == 5


def test_texts_of_several_lines_with_one_score_are_counted():
    one, two, plain = Candidate(text="a\nb"), Candidate(text="a\n\nb"), Candidate(steps=("a\nb",))
    scores = (np.array([0.5]), np.array([0.5, 0.6]), np.array([0.5]))
    every = [
        dataclasses.replace(each, step_scores=own, was_scored=True, correct=True)
        for each, own in zip((one, two, plain), scores, strict=True)
    ]
    assert pool_of([question(*every, name="texts")], ("min",)).split == SplitCounts(texts=2, unsplit=1)


def test_candidates_without_an_answer_do_not_vote():
    voters = [candidate([0.5], True, None)] * 3 + [candidate([0.5], False, "a")]
    assert accuracies([question(*voters)], (4,))[4, "majority", None] == 0.0
    assert accuracies([question(*voters[:3])], (3,))[3, "majority", None] == 0.0


def test_n_beyond_the_pool_names_the_question():
    questions = [question(*[candidate([0.5])] * 4, name="large"), question(*[candidate([0.5])] * 3, name="small")]
    pool = pool_of(questions, ("min",))
    with pytest.raises(UserError, match=r"--n=4: question 'small' has only 3 candidates"):
        evaluate(pool, (2, 4), 0, 0, 100)


def test_what_cannot_be_ranked_is_refused():
    with pytest.raises(UserError, match=r'c\.jsonl:q: candidate 0 has no "step_scores"'):
        pool_of([question(Candidate(text="", correct=True))], ("min",))
    mixed = question(candidate([0.5], logits=[0.0]), candidate([0.9]))
    with pytest.raises(UserError, match=r'candidate 1 has no "step_logits", but candidate 0 has'):
        pool_of([mixed], ("min",))
    with pytest.raises(UserError, match="no questions"):
        pool_of([], ("min",))


def test_subsets_are_uniform_nested_and_in_file_order():
    sizes = np.array([6, 4])
    count = np.zeros((2, 6))
    for subset in subsets(sizes, (3, 2), 600, 0):
        for line, (two, three) in enumerate(zip(subset[2], subset[3], strict=True)):
            assert sorted(set(three)) == list(three) and set(two) < set(three)
            assert three.max() < sizes[line]
            count[line, two] += 1
    np.testing.assert_allclose(count[0] / 600, 2 / 6, atol=0.08)
    np.testing.assert_allclose(count[1, :4] / 600, 2 / 4, atol=0.08)


def test_draws_approach_the_exact_expectation_and_report_their_spread():
    # One right candidate of four, ranked highest: a subset of two holds it with probability 1/2.
    hard = question(candidate([0.1]), candidate([0.9], True), candidate([0.2]), candidate([0.3]))
    pool = pool_of([hard], ("min",))
    found = {row.method: row for row in evaluate(pool, (2,), 2000, 0, 100)}
    assert found["best_of_n"].accuracy == pytest.approx(0.5, abs=0.04)
    assert found["best_of_n"].draws == 2000 and found["best_of_n"].draw_std == pytest.approx(0.5, abs=0.01)
    assert found["pass_at_1"].accuracy == 0.25 and found["pass_at_1"].draws == 0
    assert found["pass_at_1"].draw_std is None
    again = {row.method: row for row in evaluate(pool, (2,), 2000, 0, 100)}
    assert again == found
    assert {row.method: row for row in evaluate(pool, (2,), 2000, 1, 100)} != found


def test_parts_have_their_own_accuracy_interval_and_spread():
    easy = [question(candidate([0.9], True), candidate([0.8], True), name=f"e{k}") for k in range(3)]
    hard = [question(candidate([0.9]), candidate([0.8], True), name=f"h{k}") for k in range(2)]
    pool = pool_of(easy + hard, ("min",))
    groups = np.array([[True] * 5, [True] * 3 + [False] * 2, [False] * 3 + [True] * 2])
    found = outcomes(pool, (1, 2), 400, 0, groups)
    by_part = [{(r.n, r.method): r for r in rows(found, groups, part, 500, 0)} for part in range(3)]
    assert [part[2, "best_of_n"].accuracy for part in by_part] == [0.6, 1.0, 0.0]
    assert by_part[1][1, "best_of_n"].ci95 == (1.0, 1.0) and by_part[1][1, "best_of_n"].draw_std == 0.0
    # One of two candidates is drawn for each of two questions, either is right by half: the spread is sqrt(1/8).
    assert by_part[2][1, "best_of_n"].draw_std == pytest.approx(math.sqrt(1 / 8), abs=0.03)
    assert by_part[2][1, "pass_at_1"].draw_std is None and by_part[2][1, "pass_at_1"].draws == 0


def test_which_candidate_is_chosen():
    items = [
        question(candidate([0.1]), candidate([0.9]), candidate([0.95])),
        question(candidate(None, predicted=None), candidate(None, predicted=None), candidate([0.5], predicted=None)),
        question(*[candidate([0.5], predicted=answer) for answer in "abb"]),
    ]
    pool = pool_of([dataclasses.replace(q, id=str(k)) for k, q in enumerate(items)], ("min",))
    assert chosen(pool, "min", 2).tolist() == [1, 0, 0] and chosen(pool, "min", 3).tolist() == [2, 2, 0]
    assert majority(pool, 3).tolist() == [0, -1, 1] and majority(pool, 2).tolist() == [0, -1, 0]


def test_drawing_the_whole_pool_is_no_draw():
    rng = np.random.default_rng(0)
    questions = [
        question(
            *[candidate(rng.random(3).round(1), rng.random() < 0.5, str(rng.integers(3))) for _ in range(6)],
            name=str(number),
        )
        for number in range(20)
    ]
    assert accuracies(questions, (6,), draws=3) == pytest.approx(accuracies(questions, (6,)))


def test_a_large_file_takes_seconds():
    rng = np.random.default_rng(0)
    questions = [
        question(
            *[candidate(rng.random(10), bool(rng.random() < 0.5), str(rng.integers(9))) for _ in range(64)],
            name=str(number),
        )
        for number in range(500)
    ]
    start = time.process_time()
    evaluate(pool_of(questions, AGGREGATIONS), (8, 16, 32, 64), 0, 0, 10000)
    assert time.process_time() - start < 10
