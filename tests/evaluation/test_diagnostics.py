"""Diagnostics of step scores, on cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.evaluation.diagnostics import Collector
from cfprm_jax.evaluation.statistics import spearman, spearman_within


def diagnosed(*solutions):
    collector = Collector()
    for scores, steps in solutions:
        collector.add(None if scores is None else np.array(scores), steps)
    return collector.result()


def test_the_lowest_score_at_the_last_step():
    found = diagnosed(
        ([0.9, 0.8, 0.1], None),  # at the last
        ([0.9, 0.2, 0.5], None),
        ([0.3, 0.3], None),  # of equal ones the first counts
        ([0.1], None),  # a single step has no part in it
        ([], None),
        (None, None),  # not scored
    )
    assert found.solutions == 3 and found.lowest_at_last == pytest.approx(1 / 3)
    assert found.wrong_process == 0 and found.wrong_process_accuracy is None


def test_nothing_scored_gives_no_numbers():
    found = diagnosed((None, ["a", "b"]))
    assert found.solutions == 0 and found.lowest_at_last is None
    assert [(c.all_steps, c.within_solutions, c.solutions) for c in found.correlations] == [(None, None, 0)] * 2


def test_wrong_processes_with_a_right_answer():
    collector = Collector()
    for judged in (True, False, True, True):
        collector.add_wrong_process(judged)
    assert collector.result().wrong_process_accuracy == 0.75 and collector.result().wrong_process == 4


def test_correlations_with_length_and_position():
    # Longer is lower in both; within the solutions position goes up in one and down in the other.
    found = diagnosed(([0.9, 0.8, 0.7], ["a", "aa", "aaa"]), ([0.4, 0.5, 0.6], ["aaaaaa", "aaaaa", "aaaa"]))
    characters, position = found.correlations
    assert (characters.quantity, position.quantity) == ("characters", "position")
    assert characters.all_steps == pytest.approx(-1) and characters.within_solutions == pytest.approx(-1)
    assert characters.solutions == 2
    assert position.within_solutions == pytest.approx(0, abs=1e-12) and position.solutions == 2


def test_solutions_without_texts_have_no_part_in_length():
    found = diagnosed(([0.1, 0.9], None), ([0.5, 0.2], ["a", "aa"]), ([0.5, 0.5], ["a", "aa"]))
    characters, position = found.correlations
    assert characters.solutions == 1 and characters.within_solutions == pytest.approx(-1)
    assert position.solutions == 2
    with pytest.raises(ValueError, match="1 texts and 2 scores"):
        diagnosed(([0.1, 0.9], ["a"]))


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6), max_size=5))
def test_correlations_within_groups_are_those_of_each_group(groups):
    pairs = [np.array(group, float) for group in groups]
    one, other = (np.concatenate([np.zeros(0), *(pair[:, side] for pair in pairs)]) for side in (0, 1))
    group = np.repeat(np.arange(len(pairs)), [len(pair) for pair in pairs])
    expected = [spearman(pair[:, 0], pair[:, 1]) for pair in pairs]
    found = spearman_within(one, other, group)
    np.testing.assert_allclose(found, [np.nan if value is None else value for value in expected], atol=1e-12)


def test_the_shared_pool_has_its_lowest_score_at_the_last_step_in_eleven_percent(shared):
    collector = Collector()
    for question in read_candidates(shared / "data" / "bon" / "math500_first250_qwen2.5-7b-instruct_n32.jsonl.gz"):
        for candidate in question.candidates:
            collector.add(candidate.step_scores, candidate.steps)
    found = collector.result()
    assert f"{found.lowest_at_last:.1%}" == "11.0%" and found.solutions == 7997
    assert f"{found.correlations[0].all_steps:.2f}" == "-0.42"
