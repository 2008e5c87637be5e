"""Batches: every trajectory once a pass, no batch of two stages, and batch k the same for every reader."""

from __future__ import annotations

import collections
import itertools
import json

import jax
import numpy as np
import pytest

from cfprm_jax.config import EncodingConfig, GranularityConfig, PackingConfig, ReadConfig
from cfprm_jax.data.batching import BatchPlan, shuffled
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import Loader, difference, evaluation_batches
from cfprm_jax.data.partition import shared_forest

ENCODING = EncodingConfig(system_prompt="S", max_length=256)
TWO = GranularityConfig(c_max=2)
PACKINGS = ("tree", "sequence", "none")


def rows() -> list[dict]:
    """40 records of 1 to 7 solutions that leave a common path, as PRM800K's do."""
    rng = np.random.default_rng(0)
    out = []
    for record in range(40):
        path = [f"step {record} {i} " + "x" * int(rng.integers(9)) for i in range(int(rng.integers(1, 7)))]
        for end in range(len(path)):
            steps = [*path[:end], f"wrong {end}"] if end < len(path) - 1 else path
            labels = [1.0] * end + [float(end == len(path) - 1)]
            out.append({"prompt": f"q{record}", "completions": steps, "labels": labels, "source": f"r{record}"})
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, make_rows, tokenizer):
    directory = tmp_path_factory.mktemp("corpus")
    path = make_rows(directory / "rows.jsonl", rows())
    granularities = GranularityConfig(granularities=("4", "2", "1", "whole"))
    return open_corpus(path, ReadConfig(), granularities, ENCODING, tokenizer, cache_dir=directory / "cache")


def loader(corpus, packing="tree", granularities=TWO, batch_size=8, seed=0, row_multiple=1) -> Loader:
    options = PackingConfig(packing=packing, batch_size=batch_size, record_chunk=0)
    return Loader(corpus, granularities, options, ENCODING, seed=seed, row_multiple=row_multiple)


def members(plan: BatchPlan):
    """(stage, epoch) -> trajectories of its batches, in order."""
    passes = collections.defaultdict(list)
    for step in range(plan.num_steps):
        this, batch = plan.batch(step)
        passes[this.stage, this.epoch].append(batch)
    return passes


def plan(corpus, packing="tree", granularities=TWO, batch_size=8, seed=0) -> BatchPlan:
    return BatchPlan(corpus, granularities, packing, batch_size, seed=seed, record_chunk=0)


def same(first, second) -> bool:
    """Whether two batches are bit-equal."""
    rest = ("granularity", "epoch", "stage", "sources", "trajectories", "tokens_expanded", "tokens_computed")
    leaves = (jax.tree.leaves(batch.packed) for batch in (first, second))
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*leaves, strict=True)) and all(
        getattr(first, name) == getattr(second, name) for name in rest
    )


class TestPlan:
    @pytest.mark.parametrize("packing", PACKINGS)
    @pytest.mark.parametrize("schedule", ["coarse_to_fine", "fine_to_coarse", "shuffled"])
    def test_each_pass_visits_every_trajectory_once_and_keeps_its_remainder(self, corpus, packing, schedule):
        config = GranularityConfig(granularities=("4", "1"), epochs_per_granularity=2, schedule=schedule)
        passes = members(plan(corpus, packing, config, batch_size=7))
        expected = {"coarse_to_fine": [(4,), (1,)], "fine_to_coarse": [(1,), (4,)], "shuffled": [(4, 1)]}[schedule]
        assert list(passes) == [(stage, epoch) for stage in range(len(expected)) for epoch in range(2)]
        for (stage, _), batches in passes.items():
            total = sum(corpus.num_trajectories(g) for g in expected[stage])
            assert [len(batch) for batch in batches[:-1]] == [7] * (len(batches) - 1)
            assert len(batches[-1]) == (total % 7 or 7)
            visited = [member for batch in batches for member in batch]
            assert sorted(visited) == sorted((g, i) for g in expected[stage] for i in range(corpus.num_trajectories(g)))

    @pytest.mark.parametrize("packing", PACKINGS)
    def test_passes_differ_and_the_seed_matters(self, corpus, packing):
        config = GranularityConfig(epochs_per_granularity=3)
        orders = [
            list(itertools.chain(*batches))
            for seed in (0, 1)
            for batches in members(plan(corpus, packing, config, 8, seed)).values()
        ]
        assert len({tuple(order) for order in orders}) == 6
        again = [list(itertools.chain(*batches)) for batches in members(plan(corpus, packing, config, 8, 0)).values()]
        assert again == orders[:3]

    @pytest.mark.parametrize("schedule", ["coarse_to_fine", "shuffled"])
    def test_tree_keeps_records_together_in_depth_first_order(self, corpus, schedule):
        config = GranularityConfig(c_max=2, schedule=schedule)
        for batches in members(plan(corpus, "tree", config, batch_size=8)).values():
            visited = list(itertools.chain(*batches))
            runs = [(granularity, corpus.source(granularity, i)) for granularity, i in visited]
            records = [run for place, run in enumerate(runs) if place == 0 or runs[place - 1] != run]
            assert len(records) == len(set(records))
            tokens = [corpus[granularity][i].tokens.tolist() for granularity, i in visited]
            assert all(a <= b for a, b, x, y in zip(tokens, tokens[1:], runs, runs[1:], strict=False) if x == y)

    def test_records_of_one_are_the_order_of_the_other_packings(self, corpus):
        tree, sequence = (
            BatchPlan(corpus, TWO, packing, 8, seed=3, record_chunk=1) for packing in ("tree", "sequence")
        )
        assert members(tree) == members(sequence)

    @pytest.mark.parametrize("chunk", [1, 3, 1000])
    @pytest.mark.parametrize("schedule", ["coarse_to_fine", "shuffled"])
    def test_a_record_is_cut_into_runs_that_stay_together(self, corpus, schedule, chunk):
        config = GranularityConfig(c_max=2, schedule=schedule)
        whole = BatchPlan(corpus, config, "tree", 8, seed=0, record_chunk=0)
        cut = BatchPlan(corpus, config, "tree", 8, seed=0, record_chunk=chunk)
        for key, batches in members(cut).items():
            visited = list(itertools.chain(*batches))
            assert sorted(visited) == sorted(itertools.chain(*members(whole)[key]))
            place = {member: k for k, member in enumerate(visited)}
            records = collections.defaultdict(list)
            for granularity, i in itertools.chain(*members(whole)[key]):
                records[granularity, corpus.source(granularity, i)].append(place[granularity, i])
            for places in records.values():
                for first in range(0, len(places), chunk):
                    run = places[first : first + chunk]
                    assert run == list(range(run[0], run[0] + len(run)))
            if chunk == 1000:
                assert batches == members(whole)[key]

    def test_sequence_shuffles_trajectories_independently(self, corpus):
        (visited, *_) = [
            list(itertools.chain(*b)) for b in members(plan(corpus, "sequence", GranularityConfig())).values()
        ]
        sources = [corpus.source(g, i) for g, i in visited]
        assert sum(a == b for a, b in itertools.pairwise(sources)) < len(sources) / 4

    def test_the_last_step_is_the_last(self, corpus):
        with pytest.raises(IndexError):
            plan(corpus).batch(plan(corpus).num_steps)
        with pytest.raises(IndexError):
            plan(corpus).batch(-1)

    def test_the_order_never_changes_with_a_library(self):
        """Written out: SplitMix64 in plain integers."""
        mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

        def mix(z):
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
            return z ^ (z >> 31)

        state = mix(mix(golden + 3) + golden + 7)
        keys = [mix((state + golden * (place + 1)) & mask) for place in range(1000)]
        assert shuffled(1000, 3, 7).tolist() == sorted(range(1000), key=keys.__getitem__)
        assert shuffled(8, 0, 0, 0).tolist() == [1, 0, 4, 6, 7, 2, 3, 5]


class TestBatches:
    @pytest.mark.parametrize("packing", PACKINGS)
    def test_a_batch_holds_its_trajectories_in_the_order_of_the_plan(self, corpus, packing):
        run, order = loader(corpus, packing), plan(corpus, packing)
        assert run.num_steps == order.num_steps
        for step in range(run.num_steps):
            batch, (this, places) = run.batch(step), order.batch(step)
            encoded = [corpus[g][i] for g, i in places]
            assert batch.granularity == places[0][0]
            assert (batch.stage, batch.epoch, batch.trajectories) == (this.stage, this.epoch, len(places))
            assert batch.sources == tuple(corpus.source(g, i) for g, i in places)
            assert batch.tokens_expanded == sum(len(one.tokens) for one in encoded)
            assert batch.packed.labels.shape == (8, corpus.max_steps)
            for labels, one in zip(batch.packed.labels, encoded, strict=False):
                np.testing.assert_array_equal(labels[: len(one.labels)], one.labels)
            if packing == "tree":
                distinct = shared_forest([one.tokens for one in encoded]).size
                assert distinct <= batch.tokens_computed <= batch.tokens_expanded
            else:
                assert batch.tokens_computed == batch.tokens_expanded
            assert batch.packed.tokens.shape in run.shapes.all()

    def test_a_mixed_stage_is_marked(self, corpus):
        config = GranularityConfig(c_max=2, schedule="shuffled")
        assert {loader(corpus, granularities=config).batch(k).granularity for k in range(3)} == {"mixed"}
        assert loader(corpus, granularities=GranularityConfig(granularities=("whole",))).batch(0).granularity == "whole"

    def test_the_number_of_devices_changes_the_rows_and_not_the_trajectories(self, corpus):
        one, eight = loader(corpus), loader(corpus, row_multiple=8)
        for step in range(one.num_steps):
            a, b = one.batch(step), eight.batch(step)
            assert b.packed.tokens.shape[0] % 8 == 0
            assert a.sources == b.sources
            np.testing.assert_array_equal(a.packed.labels, b.packed.labels)
        assert one.fingerprint == eight.fingerprint

    @pytest.mark.parametrize("packing", PACKINGS)
    @pytest.mark.parametrize(("threads", "read_ahead"), [(0, 0), (1, 1), (3, 5)])
    def test_reading_threads_change_nothing(self, corpus, packing, threads, read_ahead):
        run = loader(corpus, packing)
        batches = list(run.iterator(threads, read_ahead))
        assert len(batches) == run.num_steps
        assert all(same(batch, run.batch(step)) for step, batch in enumerate(batches))

    def test_a_resumed_iterator_continues(self, corpus):
        straight = list(loader(corpus).iterator())
        for stop in (0, 1, len(straight) // 2, len(straight) - 1, len(straight)):
            iterator = loader(corpus).iterator(threads=2)
            for _ in range(stop):
                next(iterator)
            state = json.loads(json.dumps(iterator.get_state()))
            iterator.close()
            resumed = loader(corpus).iterator(threads=3, read_ahead=2)
            resumed.set_state(state)
            rest = list(resumed)
            assert len(rest) == len(straight) - stop
            assert all(same(a, b) for a, b in zip(rest, straight[stop:], strict=True))


class TestDistinctSteps:
    @pytest.mark.parametrize("packing", PACKINGS)
    def test_first_occurrences_are_those_of_the_texts(self, corpus, packing):
        """By the tokens up to each marker, one dictionary a batch."""
        run, order = loader(corpus, packing), plan(corpus, packing)
        for step in range(run.num_steps):
            distinct, steps = run.batch(step).packed.distinct, corpus.max_steps
            first = {}
            for row, (g, i) in enumerate(order.batch(step)[1]):
                one = corpus[g][i]
                for t, position in enumerate(one.step_positions):
                    place = first.setdefault(one.tokens[: position + 1].tobytes(), row * steps + t)
                    assert distinct.nodes[row, t] == place
                    assert np.isnan(distinct.labels[row, t]) == (place != row * steps + t)
                questions = [corpus[h].question(j) for h, j in order.batch(step)[1]]
                assert distinct.questions[row] == questions.index(questions[row])

    def test_held_out_steps_count_once_over_all_batches(self, corpus):
        batches = evaluation_batches(corpus, PackingConfig(batch_size=16), ENCODING)
        labels = np.concatenate([batch.distinct_labels for batch in batches])
        seen = {}
        for i in range(len(corpus[1])):
            one = corpus[1][i]
            for t, position in enumerate(one.step_positions):
                seen.setdefault(one.tokens[: position + 1].tobytes(), (i, t, float(one.labels[t])))
        assert (~np.isnan(labels)).sum() == len(seen)
        assert all(labels[i, t] == label for i, t, label in seen.values())


class TestFingerprint:
    def test_the_same_run_has_no_difference(self, corpus):
        saved = json.loads(json.dumps(loader(corpus).fingerprint))
        assert difference(saved, loader(corpus).fingerprint) is None

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"packing": "sequence"}, "packing was tree and is sequence"),
            ({"batch_size": 16}, "batch_size was 8 and is 16"),
            ({"seed": 1}, "seed was 0 and is 1"),
            ({"granularities": GranularityConfig(c_max=1)}, "granularities was ['2', '1'] and is ['1']"),
            (
                {"granularities": GranularityConfig(c_max=2, epochs_per_granularity=2)},
                "epochs_per_granularity was 1 and is 2",
            ),
            (
                {"granularities": GranularityConfig(c_max=2, schedule="shuffled")},
                "granularities was ['2', '1'] and is ['2,1']; schedule was coarse_to_fine and is shuffled",
            ),
        ],
    )
    def test_another_option_is_named(self, corpus, changed, named):
        assert difference(loader(corpus).fingerprint, loader(corpus, **changed).fingerprint) == named

    def test_another_corpus_is_named(self):
        saved = {"content of a.jsonl": "0" * 64, "max_length": 8}
        current = {"content of b.jsonl": "1" * 64, "max_length": 8}
        assert difference(saved, current) == (
            "content of a.jsonl was 0000000000000000... and is nothing; "
            "content of b.jsonl was nothing and is 1111111111111111..."
        )


class TestEvaluation:
    @pytest.mark.parametrize("packing", PACKINGS)
    def test_all_in_the_order_of_the_input_at_the_finest_granularity(self, corpus, packing):
        batches = evaluation_batches(corpus, PackingConfig(packing=packing, batch_size=16), ENCODING, 0, row_multiple=2)
        assert {batch.granularity for batch in batches} == {1}
        sources = [source for batch in batches for source in batch.sources]
        assert sources == [corpus.source(1, i) for i in range(len(corpus[1]))]
        found = [row for batch in batches for row in batch.packed.labels[: batch.trajectories]]
        for i, row in enumerate(found):
            np.testing.assert_array_equal(row[: len(corpus[1][i].labels)], corpus[1][i].labels)
        assert all(batch.packed.tokens.shape[0] % 2 == 0 for batch in batches)

    def test_a_limit_takes_whole_records_of_a_fixed_draw(self, corpus):
        packing = PackingConfig(batch_size=16)
        batches = evaluation_batches(corpus, packing, ENCODING, 50)
        sources = [source for batch in batches for source in batch.sources]
        assert 40 < len(sources) <= 50
        whole = collections.Counter(corpus.source(1, i) for i in range(len(corpus[1])))
        assert all(whole[source] == count for source, count in collections.Counter(sources).items())
        assert sources == sorted(sources, key=lambda source: int(source[1:]))
        again = evaluation_batches(corpus, packing, ENCODING, 50)
        assert all(same(a, b) for a, b in zip(batches, again, strict=True))
        assert len(set(sources)) > 5

    def test_a_limit_below_the_first_record_cuts_it(self, corpus):
        (batch,) = evaluation_batches(corpus, PackingConfig(batch_size=16), ENCODING, 1)
        assert batch.trajectories == 1

    def test_nothing_held_out_is_no_batch(self, tmp_path, make_rows, tokenizer):
        path = make_rows(tmp_path / "rows.jsonl", rows()[:3])
        empty = open_corpus(
            path,
            ReadConfig(),
            GranularityConfig(),
            ENCODING,
            tokenizer,
            cache_dir=tmp_path / "cache",
            questions="held_out",
            held_out_fraction=0.0,
        )
        assert evaluation_batches(empty, PackingConfig(), ENCODING) == []


class TestPrm800k:
    """The real corpus: how much is shared, and how full the rows are."""

    @pytest.fixture(scope="class")
    @classmethod
    def corpus(cls, shared, tmp_path_factory):
        tokenizer = load_tokenizer(shared / "data" / "tokenizers" / "qwen2.5")
        path = shared / "data" / "prm800k" / "phase1_test.jsonl"
        cache = tmp_path_factory.mktemp("cache")
        return open_corpus(path, ReadConfig(), GranularityConfig(), EncodingConfig(), tokenizer, cache_dir=cache)

    def test_the_counts_of_the_report(self, corpus):
        fine = corpus.report["granularities"]["1"]
        assert (fine["trajectories"], fine["steps"], fine["labels"]["negative"]) == (3582, 53734, 1970)
        assert fine["skipped"] == {}
        assert abs(fine["tokens_expanded"] / fine["tokens_distinct"] - 12.2) < 0.1

    @pytest.mark.parametrize(("batch_size", "expected"), [(32, 9.0), (64, 10.4), (128, 11.2), (256, 11.6)])
    def test_what_a_batch_size_takes_from_the_sharing(self, corpus, batch_size, expected):
        """Expanded over distinct tokens, each record's own, as measured for the design; the order is another."""
        order = plan(corpus, "tree", GranularityConfig(), batch_size)
        expanded = distinct = 0
        for step in range(order.num_steps):
            records = collections.defaultdict(list)
            for g, i in order.batch(step)[1]:
                records[corpus.source(g, i)].append(corpus[g][i].tokens)
            expanded += sum(len(tokens) for record in records.values() for tokens in record)
            distinct += sum(shared_forest(record).size for record in records.values())
        assert abs(expanded / distinct / expected - 1) < 0.03

    @pytest.mark.parametrize("packing", ["tree", "sequence"])
    def test_rows_are_full_and_prefixes_computed_once(self, corpus, packing):
        options = PackingConfig(packing=packing, batch_size=64, record_chunk=0)
        run = Loader(corpus, GranularityConfig(), options, EncodingConfig(), seed=0)
        batches = [run.batch(step) for step in range(run.num_steps - 1)]
        assert sum(b.tokens_computed for b in batches) / sum(b.packed.tokens.size for b in batches) > 0.95
        if packing == "tree":
            distinct = 0
            for step in range(len(batches)):
                records = collections.defaultdict(list)
                for g, i in plan(corpus, "tree", GranularityConfig(), 64).batch(step)[1]:
                    records[corpus.source(g, i)].append(corpus[g][i].tokens)
                distinct += sum(shared_forest(record).size for record in records.values())
            assert sum(b.tokens_computed for b in batches) < 1.05 * distinct
