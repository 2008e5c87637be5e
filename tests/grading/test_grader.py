"""Judging whole questions: right and wrong, groups, counts, and the reference of real candidates."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest

from cfprm_jax.data.candidates import Candidate, Question, read_candidates
from cfprm_jax.errors import UserError
from cfprm_jax.grading.grader import Grader
from cfprm_jax.grading.prm800k_rules import equal

POOL = "math500_first250_qwen2.5-7b-instruct_n32.jsonl.gz"


def question(answer, *candidates, name="q", dataset=None):
    return Question(name, "?", answer, candidates, "c.jsonl:4", dataset)


def predicted(*answers, correct=None):
    return [Candidate(text="", predicted=answer, correct=correct) for answer in answers]


def judge(grader, item, **options):
    with Grader(grader, **options) as made:
        ((_, judgement),) = made.judge([item])
        return judgement, made.report()


def test_no_grader_takes_the_candidates_own_word():
    item = question("1", Candidate(text="answer 7", correct=True), Candidate(text="", predicted="1", correct=False))
    judgement, report = judge("none", item)
    np.testing.assert_array_equal(judgement.correct, [True, False])
    assert judgement.answers == ("7", "1")
    assert report["differs_from_own_correct"] == 0
    with pytest.raises(UserError, match=r'c\.jsonl:4: candidate 1 has no "correct"'):
        judge("none", question("1", Candidate(text="", correct=True), Candidate(text="1")))


def test_groups_are_numbered_as_they_appear():
    judgement, report = judge("exact", question("2", *predicted("2", None, "1,000", "1000", " 2 ")))
    np.testing.assert_array_equal(judgement.group, [0, -1, 1, 1, 0])
    np.testing.assert_array_equal(judgement.correct, [True, False, False, False, True])
    assert report["without_answer"] == 1


def test_equal_answers_are_one_group_by_the_graders_rules():
    item = question("7", *predicted("1/2", "0.5", "\\frac{2}{4}", "3", "7", "x=7", "03"))
    judgement, _ = judge("math_verify", item)
    np.testing.assert_array_equal(judgement.group, [0, 0, 0, 1, 2, 2, 1])
    np.testing.assert_array_equal(judgement.correct, [False] * 4 + [True, True, False])
    strict, _ = judge("prm800k", item)
    np.testing.assert_array_equal(strict.group, [0, 0, 1, 2, 3, 3, 2])  # 2/4 is not reduced


def test_a_pair_is_compared_once_and_whole_numbers_need_no_rules():
    with Grader("prm800k") as grader:
        questions = [question("x+x", *predicted("2x", "2x", "5"), name=str(n)) for n in range(20)]
        judged = list(grader.judge(questions))
        assert [q.id for q, _ in judged] == [str(n) for n in range(20)]
        assert all(judgement.correct.tolist() == [True, True, False] for _, judgement in judged)
        report = grader.report()
    # 2x and 5 with the reference, and 5 with 2x.
    assert (report["pairs_compared"], report["candidates"]) == (3, 60)
    with Grader("prm800k") as grader:
        list(grader.judge([question("5", *predicted("5", "6", "05", " 5"))]))
        assert grader.report()["pairs_compared"] == 0


def test_what_takes_too_long_is_wrong_reported_and_not_tried_with_every_other_answer():
    item = question("x+1", *predicted("9^{9^{9^{9}}}", "x", "y", "9^{9^{9^{9}}}", "1+x"))
    judgement, report = judge("math_verify", item, seconds=0.5)
    np.testing.assert_array_equal(judgement.correct, [False, False, False, False, True])
    np.testing.assert_array_equal(judgement.group, [0, 1, 2, 0, 3])
    assert report["without_verdict"] == 1
    assert report["pairs_without_verdict"] == [
        {"predicted": "9^{9^{9^{9}}}", "reference": "x+1", "reason": "time limit"}
    ]


def test_verdicts_of_single_solutions_have_none_for_what_takes_too_long():
    texts = [
        Candidate(text=text) for text in ("The answer is 2.", "So \\boxed{12}", "Nothing.", "\\boxed{9^{9^{9^{9}}}}")
    ]
    with Grader("math_verify", seconds=0.5) as grader:
        # 12 has the digit 2, and is not 2.
        assert grader.verdicts((one, "2", None) for one in texts[:3]) == [True, False, False]
        assert grader.verdicts([(texts[3], "x+1", None)]) == [None]
    with Grader("none") as grader:
        assert grader.verdicts([(Candidate(text="", correct=True), "2", None), (texts[0], "2", None)]) == [True, None]


def test_other_opinions_are_counted_and_listed():
    item = question("50", *predicted("50", "50.0", "49", correct=True), *predicted("50.0", correct=True))
    _, report = judge("exact", item)
    assert (report["with_own_correct"], report["differs_from_own_correct"]) == (4, 3)
    assert report["pairs_that_differ"] == [
        {"id": "q", "predicted": "50.0", "answer": "50", "graded": False, "candidates": 2},
        {"id": "q", "predicted": "49", "answer": "50", "graded": False, "candidates": 1},
    ]


def test_gsm_answers_are_found_in_texts():
    texts = [Candidate(text="2 + 3 = 5 apples"), Candidate(text="so\n#### 6"), Candidate(text="none at all")]
    judgement, _ = judge("exact", question("2 + 3 = 5\n#### 5", *texts, dataset="gsm8k"))
    assert judgement.answers == ("5", "6", None)
    np.testing.assert_array_equal(judgement.correct, [True, False, False])


def test_a_failure_of_what_comes_after_leaves_no_process():
    with pytest.raises(RuntimeError, match="enough"), Grader("math_verify", seconds=600) as grader:
        slow = question("x+1", *predicted(*(f"9^{{9^{{9^{{{n}}}}}}}" for n in range(3, 9))))
        for _ in grader.judge([question("x+1", *predicted("1+x")), *[slow] * 9]):
            raise RuntimeError("enough")
    workers = grader._comparer._workers
    assert workers and not any(worker.alive for worker in workers)


def test_the_strict_rules_agree_with_the_reference_on_real_candidates(shared):
    pairs = collections.Counter(
        (candidate.predicted, question.answer, candidate.correct)
        for question in read_candidates(shared / "data" / "bon" / POOL)
        for candidate in question.candidates
    )
    assert sum(pairs.values()) == 8000
    # The program that made the reference reads a cube root as a square root.
    assert {pair: count for pair, count in pairs.items() if equal(*pair[:2]) != pair[2]} == {
        ("\\frac{1}{\\sqrt[3]{3}}", "\\frac{\\sqrt{3}}{3}", True): 1
    }


def test_reported_cases(shared):
    cases = shared / "cases"
    if not cases.is_dir():
        pytest.skip("no cases there")
    items, expected = [], []

    def add(candidate, answer, right):
        items.append(Question(len(items), "?", answer, [candidate], "c:1", None))
        expected.append(right)

    for line in (cases / "extraction.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(Candidate(text=row["text"]), row["answer"], row["expected"])
    for line in (cases / "grading.jsonl").read_text().splitlines():
        row = json.loads(line)
        add(Candidate(text="", predicted=row["predicted"]), row["answer"], row["expected"])
    for path in sorted((cases / "more").glob("K0[1-6]_*.jsonl")):
        for question in read_candidates(path):
            for candidate in question.candidates:
                if candidate.correct is not None:
                    add(candidate, question.answer, candidate.correct)
    with Grader("math_verify", 2) as grader:
        judged = [bool(judgement.correct[0]) for _, judgement in grader.judge(items)]
    assert [(a.candidates[0], a.answer) for a, e, j in zip(items, expected, judged, strict=True) if e != j] == []


def test_empty_boxes_are_no_answers_and_take_no_part_in_a_vote():
    texts = [Candidate(text=text) for text in ("\\boxed{5}", "\\boxed{}", "\\boxed{ }", "\\boxed{$$}", "\\boxed{**}")]
    for name in ("math_verify", "prm800k", "exact"):
        judgement, report = judge(name, question("5", *texts))
        np.testing.assert_array_equal(judgement.group, [0, -1, -1, -1, -1])
        np.testing.assert_array_equal(judgement.correct, [True, False, False, False, False])
        assert report["without_answer"] == 4
