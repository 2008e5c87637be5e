"""OmegaPRM's tree on a scripted question: the order of selection by hand, nodes, and the rows that come of it."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from scripted_rollouts import outcome, run

from cfprm_jax.config import EstimateConfig
from cfprm_jax.data import read
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.labelling import rows
from cfprm_jax.labelling.rollouts import Outcome, Rollout
from cfprm_jax.labelling.summary import Summary
from cfprm_jax.labelling.tree import Node, SearchTree, Selected, TreeSettings, score, search

QUESTION = QuestionRow("q1", "What is 7?", "7", "sums", "f:1")
A, B, C = tuple("abcdefg"), tuple("abx"), tuple("ay")


def wrong(pieces, tokens):
    return Rollout(False, tokens, False, len(pieces), "/".join(pieces))


def right(pieces):
    return Rollout(True, 100, False, len(pieces), "/".join(pieces))


# Two of four first rollouts are right. Of the wrong ones, "a..g" is short (100 tokens) and "abx" long (900).
OUTCOMES = {
    (): Outcome((right("abcdef"), wrong(A, 100), right("abcdefgh"), wrong(B, 900))),
    A[:3]: outcome(4, 4, steps=5),
    A[:5]: outcome(0, 4),
    # From "abcd" one of four succeeds; a wrong one of these ends in y after one step.
    A[:4]: Outcome((right("ef"), wrong("ey", 100), wrong("y", 2000), Rollout(None, 5, False, 1, "z"))),
    (*A[:4], "e"): outcome(0, 4),
    ("a",): Outcome((right("bcdef"), wrong("y", 400), wrong("y", 400), wrong("y", 400))),
    ("a", "b"): outcome(4, 4, steps=4),
}


@pytest.fixture
def grown():
    cut = lambda prefix, text: text.split("/")  # noqa: E731
    return run(search(TreeSettings(searches=3), lambda first: cut), OUTCOMES.__getitem__)


def test_ends_of_rollouts_are_no_rolled_steps(grown) -> None:
    """Five prefixes were rolled, and "abcde" alone has no success; "abx" is the end of a rollout."""
    tree, rolled = grown
    summary = Summary()
    summary.add_tree(tree, 4)
    assert B in tree.nodes and B not in rolled
    assert (summary.steps_rolled, summary.zeros, summary.nodes) == (len(rolled) - 1, 1, len(rolled) + 1) == (5, 1, 7)


def test_scores_by_hand() -> None:
    node = Node(("a",), outcome(2, 8), visits=3)
    settings = TreeSettings()
    # 0.5^(1 - 0.25) * 0.9^(250 / 500) + 0.125 * sqrt(16) / (1 + 3)
    expected = 0.5**0.75 * math.sqrt(0.9) + 0.125
    assert score(node, Rollout(False, 250, False, 1), 16, settings) == pytest.approx(expected, rel=1e-12)
    assert (settings.alpha, settings.beta, settings.length, settings.c_puct, settings.searches) == (
        0.5, 0.9, 500, 0.125, 100,
    )  # fmt: skip


def test_order_of_selection(grown) -> None:
    tree, rolled = grown
    # 1. Root, MC 1/2: 0.5^0.5 * 0.9^(100/500) = 0.692 against 0.5^0.5 * 0.9^(900/500) = 0.585; U is 0.
    # 2. N(root) is 1. Root's other: 0.585 + 0.125 / 2 = 0.647. "abcd", MC 1/3: 0.5^(2/3) * 0.9^0.2 = 0.617, and
    #    0.5^(2/3) * 0.9^4 = 0.413; both + 0.125 * 1 / 1. So "abcd" with "ey" has 0.742.
    # 3. N(root) = N(abcd) = 1: root 0.585 + 0.125 * sqrt(2) / 2 = 0.673, "abcd" with "y" 0.413 + 0.088 = 0.502.
    assert tree.selected == [Selected((), 1, 7), Selected(A[:4], 1, 2), Selected((), 3, 3)]
    # Every prefix begins with the question's first step, wherever the search stands.
    assert rolled == [(), A[:3], A[:5], A[:4], ("a",), ("a", "b")]
    assert [node.visits for node in tree.nodes.values()] == [2, 0, 0, 1, 0, 0, 0]


def test_no_rollout_is_searched_twice_and_the_pool_runs_empty() -> None:
    cut = lambda prefix, text: text.split("/")  # noqa: E731
    tree, rolled = run(search(TreeSettings(), lambda first: cut), OUTCOMES.__getitem__)
    taken = [(one.prefix, one.rollout) for one in tree.selected]
    # Two of the root, two of "abcd" (one has no verdict), three of "a".
    assert len(taken) == len(set(taken)) == 7
    assert len(rolled) == len(set(rolled))
    limited, _ = run(search(TreeSettings(searches=2), lambda first: cut), OUTCOMES.__getitem__)
    assert limited.selected == tree.selected[:2]


@pytest.mark.parametrize("successes", [0, 4])
def test_a_question_that_is_always_or_never_right_has_a_root_alone(successes) -> None:
    tree, rolled = run(search(TreeSettings(), lambda first: None), lambda prefix: outcome(successes, 4))
    assert rolled == [()] and list(tree.nodes) == [()] and tree.selected == [] and tree.edges() == []


def test_edges_are_rows_of_one_record(grown, tmp_path) -> None:
    tree, _ = grown
    found = list(rows.tree_rows(QUESTION, tree, "policy", edges=True))
    # "abcde" is known before "abcd" is: both stay, as the first zero on the way is "abcde" itself.
    assert [("".join(row["completions"]), row.get("context_steps", 0)) for row in found] == [
        ("a", 0), ("ab", 1), ("abc", 2), ("abcd", 3), ("abcde", 4), ("abx", 2),
    ]  # fmt: skip
    assert {row["source"] for row in found} == {"sums/q1"}
    four = found[3]
    assert four["successes"] == [1, 4, 4, 1] and four["rollouts"] == [4, 4, 4, 3]
    assert (four["question_successes"], four["question_rollouts"], four["question_remaining_steps"]) == (2, 4, 6)
    path = tmp_path / "tree.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    trajectories = list(read(path, estimates=EstimateConfig(estimate="soft")))
    assert [int(np.isfinite(t.labels).sum()) for t in trajectories] == [1] * 6
    np.testing.assert_allclose([t.labels[-1] for t in trajectories], [1 / 4, 1, 1, 1 / 3, 0, 0], rtol=1e-6)
    paths = list(rows.tree_rows(QUESTION, tree, "policy", edges=False))
    assert ["".join(row["completions"]) for row in paths] == ["abcde", "abx"]
    assert paths[0]["labels"] == [1, 1, 1, 1, 0]


def test_trees_of_math_aps_are_written_and_read(grown, tmp_path) -> None:
    tree, _ = grown
    path = tmp_path / "aps.jsonl"
    path.write_text(json.dumps(rows.math_aps_row(QUESTION, tree, "\n\n")) + "\n")
    found = [(t.steps, float(t.labels[-1])) for t in read(path)]
    edges = [(node.prefix, node.outcome.rate) for node in tree.edges()]
    assert [steps for steps, _ in found] == [prefix for prefix, _ in edges]
    np.testing.assert_allclose([rate for _, rate in found], [rate for _, rate in edges], rtol=1e-6)


def test_value_rows_of_rest_mcts_are_written_and_read(grown, tmp_path) -> None:
    tree, _ = grown
    path = tmp_path / "values.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.value_rows(QUESTION, tree)))
    found = {len(t.steps): t for t in read(path)}
    # m is 5 after "a", then 4, 3 and 2: a sixth a step; a wrong fifth step takes away (1 - V) / (2 + 1).
    values = [1 / 6, 2 / 6, 3 / 6, 4 / 6, 4 / 6 - (2 / 6) / 3]
    assert found[5].steps == ("Step 1: a", "Step 2: b", "Step 3: c", "Step 4: d", "Step 5: e")
    np.testing.assert_allclose(found[5].labels, values, rtol=1e-6)
    np.testing.assert_allclose(found[3].labels, [1 / 6, 2 / 6, 2 / 6 - (4 / 6) / 5], rtol=1e-6)


def test_nothing_after_a_first_error_is_an_edge(tmp_path) -> None:
    """Counts that rise again, and a node whose rollouts have no verdicts: its child hangs off the node above."""
    unknown = Outcome((Rollout(None, 5, False, 1, "z"),))
    nodes = {"": outcome(2, 4), "ab": outcome(0, 8), "abxy": outcome(1, 8), "abxyzw": outcome(0, 8), "c": unknown}
    nodes |= {"cd": outcome(4, 8), "ce": outcome(0, 8)}
    tree = SearchTree({tuple(prefix): Node(tuple(prefix), one) for prefix, one in nodes.items()})
    assert ["".join(node.prefix) for node in tree.edges()] == ["ab", "cd", "ce"] and tree.violations() == 1
    aps = rows.math_aps_row(QUESTION, tree, "\n\n")["reasoning_steps"]
    assert [(child["text"], child["mc_value"]) for child in aps["children"]] == [
        ("a\n\nb", 0),
        ("c\n\nd", 0.5),
        ("c\n\ne", 0),
    ]
    found = list(rows.tree_rows(QUESTION, tree, "policy", edges=True))
    assert [row["labels"][-1] for row in found] == [0, 1, 0] and [row["candidate"] for row in found] == [0, 1, 2]
    assert len(list(rows.value_rows(QUESTION, tree))) <= 3
    paths = list(rows.tree_rows(QUESTION, tree, "policy", edges=False))
    assert ["".join(row["completions"]) for row in paths] == ["ab", "cd", "ce"]
    summary = Summary()
    summary.add_tree(tree, 8)
    assert (summary.violations, summary.violating_steps) == (1, 1)


def test_cut_rollouts_count_as_wrong_and_are_not_searched() -> None:
    cut_one = dataclasses.replace(wrong("ab", 10), cut=True)
    tree, rolled = run(search(TreeSettings(), lambda first: None), lambda prefix: Outcome((right("a"), cut_one)))
    assert rolled == [()] and tree.root.outcome.rate == 0.5
