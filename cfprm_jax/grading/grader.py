"""Grading of candidates: which are correct, and which have the same answer.

Graders: "math_verify" compares answers as mathematics (math_verify_rules), "prm800k" by the strict rules of PRM800K
(prm800k_rules), "exact" as normalised texts (answers.normalise), and "none" uses "correct" of the candidates.

Candidates with equal answers form one group of a vote: an answer joins the first group whose first answer it equals.
The reference answer is not used for that. With "none", answers are grouped as by "exact". An answer whose comparison
times out is wrong, and forms its own group.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from cfprm_jax.data.candidates import Candidate, Question
from cfprm_jax.errors import UserError
from cfprm_jax.grading.answers import extract, normalise, reference
from cfprm_jax.grading.processes import Comparer
from cfprm_jax.grading.worker import RULES

GRADERS = ("math_verify", "prm800k", "exact", "none")

_INTEGER = re.compile(r"[-+]?\d{1,30}")
# Questions that are being graded while an earlier one is waited for.
_AHEAD = 8
# Pairs that results list one by one.
_LISTED = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Judgement:
    """The grades of the candidates of one question.

    Attributes:
      answers: the answer of each candidate; None if none was found.
      correct: whether each is correct.
      group: index of the group of equal answers, in order of appearance; -1 without an answer.
    """

    answers: tuple[str | None, ...]
    correct: Bool[np.ndarray, " candidates"]
    group: Int[np.ndarray, " candidates"]


class Grader:
    """Grades questions and counts the results. A context manager; otherwise call close."""

    def __init__(self, name: str, seconds: float = 5.0, processes: int = 1) -> None:
        """Creates a grader; its processes start with the first comparison.

        Args:
          name: one of GRADERS.
          seconds: CPU time limit per comparison of two answers.
          processes: number of processes.
        """
        self.name = name
        self._seconds = seconds
        self._comparer = Comparer(name, seconds) if name in RULES else None
        self._threads = concurrent.futures.ThreadPoolExecutor(max(processes, 1)) if self._comparer else None
        self._verdicts: dict[tuple[str, str], bool | None] = {}
        self._candidates = self._unanswered = self._with_own = 0
        self._differing: dict[tuple[Any, str | None, str, bool], int] = {}

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        if self._comparer is not None:
            self._comparer.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def judge(self, questions: Iterable[Question]) -> Iterator[tuple[Question, Judgement]]:
        """The questions, in their order, each with its judgement.

        Raises:
          UserError: --grader=none and a candidate without "correct".
        """
        if self._threads is None:
            for question in questions:
                yield question, self._counted(question, self._judgement(question))
            return
        waiting: collections.deque[tuple[Question, concurrent.futures.Future[Judgement]]] = collections.deque()
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [future.cancel() for _, future in waiting])
            for question in questions:
                waiting.append((question, self._threads.submit(self._judgement, question)))
                if len(waiting) > _AHEAD:
                    first, future = waiting.popleft()
                    yield first, self._counted(first, future.result())
            while waiting:
                first, future = waiting.popleft()
                yield first, self._counted(first, future.result())

    def verdicts(self, solutions: Iterable[tuple[Candidate, str, str | None]]) -> list[bool | None]:
        """Whether each solution reaches its reference answer; None where the comparison is stopped.

        Args:
          solutions: a candidate, the reference answer, and the name of the dataset (see :func:`extract`).
        """

        def one(solution: tuple[Candidate, str, str | None]) -> bool | None:
            candidate, answer, dataset = solution
            if self.name == "none":
                return candidate.correct
            predicted = extract(candidate, dataset)
            return False if predicted is None else self._equal(predicted, reference(answer))

        return list((self._threads.map if self._threads else map)(one, solutions))

    def _judgement(self, question: Question) -> Judgement:
        answers = tuple(extract(candidate, question.dataset) for candidate in question.candidates)
        gold = reference(question.answer)
        groups: dict[str, int] = {}
        representatives: list[str] = []
        if self.name == "none":
            correct = np.array([_own_word(question, number) for number in range(len(answers))])
        else:
            correct = np.array([answer is not None and bool(self._equal(answer, gold)) for answer in answers])
        # An answer that timed out once would time out again.
        slow = {answer for answer in answers if answer is not None and self._equal(answer, gold) is None}
        for answer in answers:
            if answer is None or answer in groups:
                continue
            groups[answer] = len(representatives)
            for number, other in enumerate(representatives):
                if slow.isdisjoint((answer, other)):
                    verdict = self._equal(answer, other)
                    if verdict:
                        groups[answer] = number
                        break
                    if verdict is None:
                        slow.add(max(answer, other, key=len))
            if groups[answer] == len(representatives):
                representatives.append(answer)
        return Judgement(answers, correct, np.array([-1 if a is None else groups[a] for a in answers], np.int64))

    def _equal(self, predicted: str, gold: str) -> bool | None:
        """Whether two answers are equal, None without a verdict; each pair is compared once."""
        if self._comparer is None:
            return normalise(predicted) == normalise(gold)
        # Most wrong answers are whole numbers, which are compared here.
        one, other = predicted.strip(), gold.strip()
        if one == other:
            return bool(one)
        if _INTEGER.fullmatch(one) and _INTEGER.fullmatch(other):
            return int(one) == int(other)
        if (predicted, gold) not in self._verdicts:
            self._verdicts[predicted, gold] = self._comparer.equal(predicted, gold)
        return self._verdicts[predicted, gold]

    def _counted(self, question: Question, judgement: Judgement) -> Judgement:
        self._candidates += len(judgement.answers)
        self._unanswered += sum(answer is None for answer in judgement.answers)
        if self.name == "none":
            return judgement
        for candidate, answer, correct in zip(question.candidates, judgement.answers, judgement.correct, strict=True):
            if candidate.correct is None:
                continue
            self._with_own += 1
            if candidate.correct != correct:
                key = (question.id, answer, question.answer, bool(correct))
                self._differing[key] = self._differing.get(key, 0) + 1
        return judgement

    def report(self) -> dict[str, Any]:
        """What was graded, as an object of results.json."""
        stopped = [] if self._comparer is None else self._comparer.stopped
        return {
            "grader": self.name,
            "candidates": self._candidates,
            "without_answer": self._unanswered,
            "pairs_compared": len(self._verdicts),
            "seconds_a_pair": self._seconds if self._comparer else None,
            "without_verdict": len(stopped),
            "pairs_without_verdict": [dataclasses.asdict(pair) for pair in stopped[:_LISTED]],
            "with_own_correct": self._with_own,
            "differs_from_own_correct": sum(self._differing.values()),
            "pairs_that_differ": [
                {"id": id_, "predicted": answer, "answer": gold, "graded": graded, "candidates": count}
                for (id_, answer, gold, graded), count in list(self._differing.items())[:_LISTED]
            ],
        }


def _own_word(question: Question, number: int) -> bool:
    correct = question.candidates[number].correct
    if correct is None:
        raise UserError(
            f'{question.source}: candidate {number} has no "correct", and answers are not compared here: '
            "docs/candidates.md describes how to add it; bon --grader=math_verify compares answers"
        )
    return correct
