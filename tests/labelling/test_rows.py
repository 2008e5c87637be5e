"""Outcomes to stepwise rows, by hand."""

from __future__ import annotations

from scripted_rollouts import outcome, run

from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.labelling import first_error
from cfprm_jax.labelling.inputs import InputSolution, Labelled
from cfprm_jax.labelling.rows import solution_row
from cfprm_jax.labelling.summary import Summary

QUESTION = QuestionRow(7, "1+1+1+1?", "4", None, "in.jsonl:1")


def labelled_row(correct: bool | None, successes: int):
    """The row and the summary of a solution of four steps, all of whose prefixes have this many successes of 8."""
    solution = InputSolution(0, tuple("abcd"), correct)
    outcomes, _ = run(first_error.sweep(solution.steps, stop_at_zero=True), lambda _: outcome(successes, steps=5))
    summary = Summary()
    summary.add_solution(solution, outcomes, 8)
    return solution_row(Labelled(QUESTION, (), (solution,), (1, 2)), solution, outcomes, "p"), summary


def test_a_correct_solution_keeps_the_count_of_its_last_step_when_the_first_has_no_success() -> None:
    row, summary = labelled_row(correct=True, successes=0)
    assert row["successes"] == [0, None, None, 1] and row["rollouts"] == [8, None, None, 1]
    assert row["remaining_steps"] == [3, 2, 1, 0] and row["correct"] is True
    assert row["labels"] == [0, None, None, None]
    assert (summary.violations, summary.correct_with_zeros) == (1, 1)


def test_an_incorrect_solution_without_successes_has_no_remaining_steps() -> None:
    row, summary = labelled_row(correct=False, successes=0)
    assert row["successes"] == [0, None, None, 0] and row["rollouts"] == [8, None, None, 1]
    assert row["remaining_steps"] == [None] * 4 and row["labels"] == [0, None, None, None]
    assert (summary.violations, summary.correct_with_zeros) == (0, 0)


def test_the_last_step_of_a_solution_of_unknown_correctness_has_no_count() -> None:
    row, summary = labelled_row(correct=None, successes=3)
    assert row["successes"] == [3, 3, 3, None] and row["rollouts"] == [8, 8, 8, None]
    assert row["remaining_steps"] == [5, 5, 5, None] and row["labels"] == [1, 1, 1, None]
    assert summary.correct_with_zeros == 0


def test_remaining_steps_are_those_of_the_shortest_correct_continuation() -> None:
    """The solution itself is one, with fewer steps than the rollouts."""
    row, _ = labelled_row(correct=True, successes=3)
    assert row["remaining_steps"] == [3, 2, 1, 0] and row["labels"] == [1, 1, 1, 1]
