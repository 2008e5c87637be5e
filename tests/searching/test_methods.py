"""Search in an exact world: digits to a target, with a reward that is right; and what it costs."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.searching.methods import Partial, SearchOptions, search

TARGET = ("3", "1", "0", "2", "1", "3")


def right(partial: Partial) -> bool:
    return partial.steps == TARGET[: len(partial.steps)]


class Digits:
    """Random digits of 0 to 3; a step is one digit of two tokens, and six of them are a solution."""

    def __init__(self, seed: int, never: str = "") -> None:
        self._random, self._never = random.Random(seed), never
        self.rows: list[Partial] = []
        self.sampled = self.computed = self.segments = 0
        self.widths: list[int] = []
        self.lost = False  # whether a branch ever left all right rows behind

    def begin(self, question) -> None:
        self.rows = [Partial()]
        self.computed += 5

    def branch(self, parents) -> None:
        if any(right(row) and row.finish is None for row in self.rows):
            self.lost |= not any(right(self.rows[i]) for i in parents)
        self.rows = [self.rows[i] for i in parents]

    def advance(self, to_end: bool = False, greedy: bool = False) -> None:
        self.widths.append(sum(row.finish is None for row in self.rows))
        for i, row in enumerate(self.rows):
            while row.finish is None:
                digit = "0" if greedy else self._random.choice([d for d in "0123" if d != self._never])
                steps = (*row.steps, digit)
                segment = (self.segments, 2)
                self.segments, self.sampled, self.computed = self.segments + 1, self.sampled + 2, self.computed + 2
                row = Partial(steps, (*row.segments, segment), "stop" if len(steps) == len(TARGET) else None)
                if not to_end:
                    break
            self.rows[i] = row

    def mark(self):
        return list(self.rows)

    def restore(self, mark) -> None:
        self.rows = list(mark)


class Exact:
    """A logit of 5 for a step after which the solution is right, -5 for others; None over a length."""

    def __init__(self, longest: int = 99) -> None:
        self.calls = self.computed = self.requested = 0
        self._longest = longest

    def score(self, question, solutions):
        self.calls += 1
        self.requested += sum(map(len, solutions))
        return [
            np.array([5.0 if steps[: t + 1] == TARGET[: t + 1] else -5.0 for t in range(len(steps))], np.float32)
            if len(steps) <= self._longest
            else None
            for steps in solutions
        ]


def run(seed: int = 0, **options):
    policy, reward = Digits(seed), Exact()
    found, cost = search(None, "q", policy, reward, SearchOptions(**options))
    return policy, reward, found, cost


@given(
    st.integers(0, 10**6),
    st.sampled_from(["beam", "greedy"]),
    st.sampled_from([(4, 2), (8, 4), (16, 4), (6, 6)]),
    st.integers(1, 4),
)
def test_no_right_solution_is_left_behind(seed, method, sizes, granularity) -> None:
    """With exact scores a right solution comes out whenever one of the sampled steps allows."""
    policy, _, found, cost = run(seed, method=method, n=sizes[0], width=sizes[1], granularity=granularity)
    assert not policy.lost
    assert 0 < len(found) <= (1 if method == "greedy" else sizes[0])
    ranks = [one.rank for one in found]
    assert ranks == sorted(ranks, reverse=True)
    if any(right(one.partial) for one in found):
        assert found[0].partial.steps == TARGET
    assert all(one.partial.finish == "stop" and len(one.partial.steps) == 6 for one in found)
    kept = {segment for one in found for segment in one.partial.segments}
    assert cost.sampled_tokens == policy.sampled and cost.policy_tokens == policy.sampled + 5
    assert cost.discarded_tokens == cost.sampled_tokens - 2 * len(kept) >= 0


def test_search_finds_what_sampling_does_not() -> None:
    def solved(method: str) -> int:
        return sum(
            run(seed, method=method, n=16, width=4, keep_duplicates=True)[2][0].partial.steps == TARGET
            for seed in range(40)
        )

    assert solved("best_of_n") <= 2  # 16 of 4096
    assert solved("greedy") > 30  # 16 tries of each step: 0.99^6 of 40
    assert solved("beam") >= 20
    assert solved("dvts") > solved("best_of_n")


@pytest.mark.parametrize("granularity", [1, 2, 3, 6])
def test_the_score_is_read_every_g_steps(granularity) -> None:
    policy, reward, _, _ = run(method="beam", n=8, width=4, granularity=granularity)
    assert reward.calls == math.ceil(6 / granularity)
    # Between checks the kept go alone.
    assert (
        policy.widths
        == [width for _ in range(reward.calls) for width in [2] * (granularity - 1) + [8]][: len(policy.widths)]
    )


def test_best_of_n_is_n_solutions_and_one_reading() -> None:
    policy, reward, found, cost = run(method="best_of_n", n=8)
    assert len(found) == 8 and reward.calls == cost.calls == 1 and cost.discarded_tokens == 0
    assert cost.sampled_tokens == 8 * 12 and policy.widths == [8]


def test_the_last_step_runs_to_the_end() -> None:
    for method in ("beam", "dvts", "greedy"):
        _, reward, found, _ = run(method=method, n=8, width=4, max_steps=3)
        assert reward.calls == 3 and all(len(one.partial.steps) == 6 for one in found)


def test_trees_stay_apart() -> None:
    """Each of four trees gives at least one solution, of its own beginning."""
    _, _, found, _ = run(method="dvts", n=16, width=4, keep_duplicates=True)
    assert len(found) == 16
    roots = {one.partial.segments[0] for one in found}
    assert len(roots) == 4


def test_what_finishes_between_checks_is_not_copied() -> None:
    for method in ("beam", "dvts"):
        _, _, found, _ = run(method=method, n=8, width=4, granularity=7, keep_duplicates=True)
        assert len({one.partial.segments for one in found}) == len(found) == 2


def test_equal_texts_are_kept_once_without_keep_duplicates() -> None:
    class Same(Digits):
        def __init__(self) -> None:
            super().__init__(0)
            self._random = random.Random(0)
            self._random.choice = lambda options: "3"  # type: ignore[method-assign]

    for keep, count in ((False, 1), (True, 8)):
        found, _ = search(None, "q", Same(), Exact(), SearchOptions("beam", 8, 4, keep_duplicates=keep))
        assert len(found) == count


def test_lookahead_ranks_by_later_scores_and_is_discarded() -> None:
    """After a right first step comes a greedy 0, which is wrong: all rows rank alike, and none is longer for it."""
    policy, reward = Digits(1), Exact()
    found, cost = search(None, "q", policy, reward, SearchOptions("greedy", 4, 4, lookahead=1, aggregation="last"))
    assert len(found[0].partial.steps) == 6 and len(found[0].logits) == 6
    assert cost.discarded_tokens == cost.sampled_tokens - 12
    assert reward.requested > 4 * (1 + 2 + 3 + 4 + 5 + 6)


def test_a_lookahead_over_the_limit_leaves_a_row_its_own_score() -> None:
    options = SearchOptions("greedy", 4, 4, lookahead=2, aggregation="last")
    found, _ = search(None, "q", Digits(1), Exact(longest=6), options)
    short, _ = search(None, "q", Digits(1), Exact(longest=5), options)
    assert len(found[0].partial.steps) == 6 and len(found[0].logits) == 6
    # Six steps are too long for it, and five are not, whatever lies ahead of them.
    assert len(short[0].partial.steps) == 6 and short[0].logits is None


def test_solutions_over_the_limit_have_no_scores() -> None:
    for method in ("beam", "dvts", "greedy", "best_of_n"):
        found, _ = search(None, "q", Digits(0), Exact(longest=3), SearchOptions(method, 8, 4))
        assert found and all(one.logits is None and one.rank == -math.inf for one in found)
        assert {len(one.partial.steps) for one in found} == {6 if method == "best_of_n" else 4}


def test_options_are_plain() -> None:
    assert dataclasses.replace(SearchOptions(), granularity=3).checks == 14
