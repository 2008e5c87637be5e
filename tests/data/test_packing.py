"""Packing: every trajectory can be read back from the rows by the visibility rule alone, under every packing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.config import PackingConfig
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import forest_of, pack, tokens_placed
from cfprm_jax.data.partition import common_prefix, divide, longest_first, separate_forest, shared_forest
from cfprm_jax.data.row_shapes import RowShapes, fit_shapes, row_lengths
from cfprm_jax.errors import UserError

MARKER = 9
PACKINGS = ("tree", "sequence", "none")
ROOMY = RowShapes(((1, 64), (2, 64), (4, 64), (16, 64), (32, 64)))


def solution(prompt, steps, labels=None) -> Encoded:
    """Encoded from lists of token ids."""
    tokens, positions = list(prompt), []
    for step in steps:
        tokens += [*step, MARKER]
        positions.append(len(tokens) - 1)
    labels = [len(tokens) / 100 + i / 1000 for i in range(len(steps))] if labels is None else labels
    return Encoded(np.array(tokens, np.int32), np.array(positions, np.int32), np.array(labels, np.float32), 0)


# Few tokens and few lengths, so that prefixes, duplicates and solutions that continue others are common.
_steps = st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=6)
_solutions = st.builds(solution, st.sampled_from([[5], [5, 6, 7], [5, 6, 8, 8]]), _steps)
families = st.lists(_solutions, min_size=1, max_size=16)


def seen(batch, row: int, column: int) -> np.ndarray:
    """Columns that a token sees: j <= i < subtree_end[j]."""
    columns = np.arange(batch.tokens.shape[1])
    return columns[(columns <= column) & (column < batch.subtree_end[row])]


def check_rows(batch, encoded) -> None:
    """Each solution is what its last marker sees; labels stand at the right markers; the rest is padding."""
    length = batch.tokens.shape[1]
    used = np.zeros(batch.tokens.shape, bool)
    for i, one in enumerate(encoded):
        steps = len(one.step_positions)
        row, column = divmod(int(batch.step_positions[i, steps - 1]), length)
        columns = seen(batch, row, column)
        used[row, columns] = True
        np.testing.assert_array_equal(batch.tokens[row, columns], one.tokens)
        np.testing.assert_array_equal(batch.positions[row, columns], np.arange(len(one.tokens)))
        # Every step's marker is the path's token at its place, and what a token sees is the path up to it.
        np.testing.assert_array_equal(batch.step_positions[i, :steps], row * length + columns[one.step_positions])
        for depth, place in enumerate(columns):
            np.testing.assert_array_equal(seen(batch, row, place), columns[: depth + 1])
        np.testing.assert_array_equal(batch.labels[i, :steps], one.labels)
        assert np.isnan(batch.labels[i, steps:]).all()
        assert (batch.step_positions[i, steps:] == 0).all()
    assert np.isnan(batch.labels[len(encoded) :]).all()
    assert (batch.step_positions[len(encoded) :] == 0).all()
    # Used tokens stand first in their row, and padding sees itself alone.
    assert (used == (np.arange(length) < used.sum(axis=1)[:, None])).all()
    rows, columns = np.nonzero(~used)
    assert (batch.subtree_end[rows, columns] == columns + 1).all()
    assert (batch.tokens[rows, columns] == 0).all()
    assert (batch.positions[rows, columns] == 0).all()
    assert tokens_placed(batch) == used.sum()


def distinct_prefixes(encoded) -> int:
    return len({tuple(one.tokens[: n + 1].tolist()) for one in encoded for n in range(len(one.tokens))})


@settings(max_examples=120)
@given(families, st.sampled_from(PACKINGS))
def test_every_solution_is_read_back_by_the_visibility_rule(encoded, packing):
    batch = pack(encoded, packing, ROOMY, trajectories=20, steps=8)
    check_rows(batch, encoded)
    if packing != "tree":
        assert tokens_placed(batch) == sum(len(one.tokens) for one in encoded)


@settings(max_examples=120)
@given(families, st.integers(0, 12))
def test_a_tree_in_one_row_holds_every_distinct_prefix_once(encoded, spare):
    length = distinct_prefixes(encoded) + spare
    batch = pack(encoded, "tree", RowShapes(((1, length),)), 16, 8)
    check_rows(batch, encoded)
    assert tokens_placed(batch) == distinct_prefixes(encoded)


@settings(max_examples=120)
@given(families, st.integers(0, 10))
def test_trees_larger_than_a_row_are_cut_at_branches(encoded, spare):
    """Rows hardly longer than the longest solution force cuts; nothing is lost and no row overflows."""
    longest = max(len(one.tokens) for one in encoded)
    batch = pack(encoded, "tree", RowShapes.covering([longest + spare], len(encoded)), 16, 8)
    check_rows(batch, encoded)
    assert distinct_prefixes(encoded) <= tokens_placed(batch) <= sum(len(one.tokens) for one in encoded)


@settings(max_examples=40)
@given(families, st.sampled_from(PACKINGS))
def test_packing_is_deterministic(encoded, packing):
    first, second = (pack(encoded, packing, ROOMY, 20, 8) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@settings(max_examples=60)
@given(families, st.integers(1, 6), st.integers(0, 40))
def test_a_division_holds_everything_once_and_within_its_rows(encoded, rows, spare):
    sequences = [one.tokens for one in encoded]
    length = max(map(len, sequences)) + spare
    for forest in (shared_forest(sequences), separate_forest(sequences)):
        division = divide(forest, rows, length)
        if division is None:
            assert forest.size > length
            continue
        assert len(division) <= rows
        assert sorted(np.concatenate(division).tolist()) == list(range(len(sequences)))
        for places in division:
            members = [encoded[i] for i in forest.order[places]]
            whole = sum(len(one.tokens) for one in members)
            assert (distinct_prefixes(members) if forest.common or forest.shared.any() else whole) <= length


@given(families)
def test_the_deepest_branch_of_every_node_comes_first(encoded):
    forest = shared_forest([one.tokens for one in encoded])
    order, shared = longest_first(forest.lengths, forest.shared[1:])
    assert sorted(order.tolist()) == list(range(len(encoded)))
    sequences = [encoded[i].tokens for i in forest.order[order]]
    assert shared.tolist() == [common_prefix(a, b) for a, b in itertools.pairwise(sequences)]
    # Depth first: in whatever order, the distinct prefixes are as many.
    assert forest.lengths.sum() - shared.sum() == forest.size
    for place, sequence in enumerate(sequences):
        before = shared[place - 1] if place else -1
        for later in range(place + 1, len(sequences)):
            # Until a node nearer to the root than this branch, no branch goes deeper than it.
            if shared[later - 1] < before:
                break
            assert len(sequences[later]) <= len(sequence)


def test_a_record_in_exact_arrays():
    """[1 2|] with the branches [3|], [4|[5|]] and a tree of its own, [7|]; | is the marker."""
    encoded = [
        solution([1, 2], [[], [4], [5]], [1.0, 0.5, np.nan]),
        solution([7], [[]], [0.25]),
        solution([1, 2], [[], [3]], [1.0, 0.0]),
        solution([1, 2], [[], [4]], [1.0, 1.0]),
    ]
    batch = pack(encoded, "tree", RowShapes(((1, 12),)), trajectories=5, steps=3)
    assert batch.tokens.tolist() == [[1, 2, 9, 4, 9, 5, 9, 3, 9, 7, 9, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 3, 4, 0, 1, 0]]
    assert batch.subtree_end.tolist() == [[9, 9, 9, 7, 7, 7, 7, 9, 9, 11, 11, 12]]
    assert batch.step_positions.tolist() == [[2, 4, 6], [10, 0, 0], [2, 8, 0], [2, 4, 0], [0, 0, 0]]
    nan = np.nan
    expected = [[1, 0.5, nan], [0.25, nan, nan], [1, 0, nan], [1, 1, nan], [nan, nan, nan]]
    np.testing.assert_array_equal(batch.labels, np.array(expected, np.float32))
    assert [array.dtype for array in batch[:5]] == ["int32"] * 4 + ["float32"]


def test_a_sequence_alone_is_the_causal_case():
    one = solution([5, 6], [[1], [2, 3]])
    batch = pack([one], "none", RowShapes(((2, 10),)), 1, 2)
    assert batch.positions.tolist() == [[*range(7), 0, 0, 0], [0] * 10]
    assert batch.subtree_end.tolist() == [[7] * 7 + [8, 9, 10], list(range(1, 11))]


def test_a_solution_without_steps_takes_no_room():
    encoded = [solution([5], [[1]]), solution([5, 6], []), solution([5], [[2]])]
    batch = pack(encoded, "none", RowShapes(((2, 8),)), 3, 1)
    assert batch.tokens[:, :3].tolist() == [[5, 1, 9], [5, 2, 9]]
    assert batch.step_positions[:, 0].tolist() == [2, 0, 10]
    assert np.isnan(batch.labels[1]).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_nothing_to_read_is_a_batch_of_padding(packing):
    for encoded in ([], [solution([5], [])]):
        batch = pack(encoded, packing, ROOMY, 2, 3)
        check_rows(batch, [])
        assert batch.tokens.shape == (1, 64)


def test_the_cheapest_shape_that_holds_the_batch_is_taken():
    shapes = RowShapes(((4, 64), (1, 256), (1, 64), (2, 64), (1, 128)))
    assert shapes.all() == ((1, 64), (2, 64), (1, 128), (4, 64), (1, 256))
    for count, shape in ((1, (1, 64)), (3, (2, 64)), (5, (4, 64))):
        encoded = [solution([i], [[1] * 28]) for i in range(count)]
        assert pack(encoded, "sequence", shapes, 8, 1).tokens.shape == shape


def test_sequences_fill_rows_that_their_lengths_can_fill():
    lengths = [17, 13, 11, 9, 8, 6]
    encoded = [solution([i] * (n - 1), [[]]) for i, n in enumerate(lengths)]
    batch = pack(encoded, "sequence", RowShapes(((2, 32), (8, 32))), 8, 1)
    assert batch.tokens.shape == (2, 32)
    check_rows(batch, encoded)


def test_the_cut_of_a_tree_repeats_as_little_as_it_can():
    """A record of 81 tokens for rows of 75 can be cut at depth 30 or at depth 51; the shallower cut repeats less."""
    root, trunk = [5] * 30, [1] * 20
    encoded = [
        solution(root, [[2] * 9]),
        solution(root, [trunk, [3] * 9]),
        solution(root, [trunk, [4] * 9]),
        solution([8], [[]]),
    ]
    batch = pack(encoded, "tree", RowShapes(((2, 75),)), 4, 2)
    check_rows(batch, encoded)
    assert distinct_prefixes(encoded) == 81 + 2
    assert tokens_placed(batch) == 81 + 2 + 30


def test_short_solutions_of_a_question_stay_together():
    """Questions of 12 tokens that differ from the third on, with answers of 4: each question is in one row, once."""
    questions = [[5, 6, *itertools.repeat(10 + i, 10)] for i in range(12)]
    encoded = [solution(question, [[20 + j] * 3]) for question in questions for j in range(8)]
    batch = pack(encoded, "tree", RowShapes(((12, 64),)), 96, 1)
    check_rows(batch, encoded)
    # Of all 2 + 12 (10 + 8 * 4) distinct prefixes, the two tokens of all questions are repeated in the other 11 rows.
    assert tokens_placed(batch) == distinct_prefixes(encoded) + 11 * 2


class TestErrors:
    @pytest.mark.parametrize("packing", PACKINGS)
    def test_a_sequence_longer_than_the_longest_row(self, packing):
        with pytest.raises(UserError, match=r"65 tokens"):
            pack([solution([1] * 64, [[]])], packing, ROOMY, 1, 1)

    @pytest.mark.parametrize("packing", PACKINGS)
    def test_more_than_the_largest_shape_holds(self, packing):
        encoded = [solution([i], [[1] * 6]) for i in range(5)]
        with pytest.raises(UserError, match=r"5 sequences"):
            pack(encoded, packing, RowShapes(((1, 8), (2, 8))), 8, 1)

    def test_more_solutions_or_steps_than_places(self):
        with pytest.raises(UserError, match="2 solutions of up to 1 steps do not fit into a batch of 1 by 1"):
            pack([solution([1], [[1]])] * 2, "tree", ROOMY, 1, 1)
        with pytest.raises(UserError, match="1 solutions of up to 2 steps do not fit into a batch of 1 by 1"):
            pack([solution([1], [[1], [2]])], "tree", ROOMY, 1, 1)

    def test_a_row_length_shorter_than_the_longest_sequence(self):
        with pytest.raises(UserError, match="--row_length=128 is shorter"):
            row_lengths(PackingConfig(row_length=128), 129)


class TestRowShapes:
    def test_lengths_are_multiples_of_128(self):
        assert row_lengths(PackingConfig(packing="none"), 500) == (128, 256, 384, 512)
        assert row_lengths(PackingConfig(packing="tree"), 300) == tuple(range(128, 1025, 128))
        assert row_lengths(PackingConfig(packing="sequence"), 2048) == tuple(range(128, 2561, 128))
        assert row_lengths(PackingConfig(packing="none"), 20) == (16, 32)
        assert len(row_lengths(PackingConfig(packing="tree"), 32768)) == 64
        assert row_lengths(PackingConfig(packing="tree", row_length=700), 500) == (700,)

    @staticmethod
    def sample(seed: int, batches: int, size: int):
        """Batches of random trees of up to 400 tokens a solution."""
        rng = np.random.default_rng(seed)
        for _ in range(batches):
            trunks = [rng.integers(10, 99, rng.integers(50, 300)).tolist() for _ in range(size // 4)]
            cuts = [rng.integers(0, len(trunk)) for trunk in trunks for _ in range(4)]
            branches = [rng.integers(10, 99, rng.integers(1, 99)).tolist() for _ in cuts]
            yield [
                solution([1, 2], [trunks[i // 4][:c], b]) for i, (c, b) in enumerate(zip(cuts, branches, strict=True))
            ]

    @pytest.mark.parametrize("packing", PACKINGS)
    @pytest.mark.parametrize("row_multiple", [1, 8])
    def test_a_small_set_of_shapes_fits_the_sample_and_holds_any_batch(self, packing, row_multiple):
        config = PackingConfig(packing=packing, batch_size=16)
        forests = [forest_of(encoded, packing) for encoded in self.sample(0, 32, 16)]
        shapes = fit_shapes(forests, config, 405, 16, row_multiple)
        assert len(shapes.all()) <= config.row_shapes + 4
        assert all(rows % row_multiple == 0 and length % 128 == 0 for rows, length in shapes.all())
        area = placed = 0
        for encoded in self.sample(1, 24, 16):
            batch = pack(encoded, packing, shapes, 16, 2)
            assert batch.tokens.shape in shapes.all()
            check_rows(batch, encoded)
            area, placed = area + batch.tokens.size, placed + tokens_placed(batch)
        if packing != "none" and row_multiple == 1:
            assert placed / area > 0.85
        worst = [solution([i, *range(403)], [[]]) for i in range(16)]
        assert pack(worst, packing, shapes, 16, 1).tokens.shape in shapes.all()

    def test_a_given_row_length_is_the_only_one(self):
        config = PackingConfig(packing="tree", row_length=512)
        forests = [forest_of(encoded, "tree") for encoded in self.sample(0, 8, 16)]
        assert {length for _, length in fit_shapes(forests, config, 405, 16).all()} == {512}

    def test_rows_hardly_longer_than_solutions_are_fitted_too(self):
        """Every cut repeats a third of a row, so that far more rows are needed than the distinct tokens fill."""
        config = PackingConfig(packing="tree", row_length=64, row_shapes=1)
        batches = []
        for first in range(100, 108):
            trunks = [[first, i, *[1] * 18] for i in range(8)]
            batches.append([solution(trunk, [[20 + j] * 19]) for trunk in trunks for j in range(12)])
        forests = [forest_of(encoded, "tree") for encoded in batches]
        shapes = fit_shapes(forests, config, 40, 96)
        for encoded in batches:
            batch = pack(encoded, "tree", shapes, 96, 1)
            check_rows(batch, encoded)
            assert tokens_placed(batch) / batch.tokens.size > 0.8

    def test_a_batch_that_fits_shorter_rows_is_known_to_fit_longer_ones(self):
        """With one shape to choose, the one that holds both batches saves more than the best for the small one."""
        forests = [forest_of([solution([1] * tokens, [[]])], "tree") for tokens in (99, 639)]
        assert fit_shapes(forests, PackingConfig(packing="tree", row_shapes=1), 640, 1).all() == ((1, 640), (1, 1920))

    def test_covering_shapes_double_up_to_one_row_a_trajectory(self):
        shapes = RowShapes.covering([128, 256], trajectories=12, row_multiple=2)
        assert set(shapes.all()) == {(rows, length) for rows in (2, 4, 8, 12) for length in (128, 256)}
        assert shapes.longest == 256

    def test_it_refuses_an_empty_set(self):
        with pytest.raises(ValueError, match="positive"):
            RowShapes(())


def test_a_deep_chain_of_solutions_that_continue_each_other():
    """Each solution is a prefix of the next, deeper than Python's recursion limit would allow a recursive trie."""
    encoded = [solution([5], [[1]] * n) for n in range(1, 1501)]
    batch = pack(encoded, "tree", RowShapes(((1, 3072),)), 1500, 1500)
    assert tokens_placed(batch) == 3001
    assert batch.step_positions[1499].tolist() == list(range(2, 3002, 2))
