"""Batches under a budget of computed tokens: whole records, exact counts, records that are larger than a step."""

from __future__ import annotations

import collections
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.config import EncodingConfig, GranularityConfig, PackingConfig, ReadConfig
from cfprm_jax.data import budget
from cfprm_jax.data.batching import BatchPlan
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.loader import Loader
from cfprm_jax.data.partition import shared_forest

ENCODING = EncodingConfig(system_prompt="S", max_length=256)


@st.composite
def corpora(draw: st.DrawFn) -> list[list[np.ndarray]]:
    """Records of token sequences that begin alike."""
    sequence = st.lists(st.integers(1, 2), min_size=1, max_size=8)
    records = draw(st.lists(st.lists(sequence, min_size=1, max_size=6), min_size=1, max_size=8))
    return [[np.array([9, *one], np.int32) for one in record] for record in records]


def costs_of(records: list[list[np.ndarray]]) -> tuple[budget.Costs, list[np.ndarray], list[int]]:
    """Costs, the sequences in depth-first order, and the record of each."""
    lengths, shared, ordered, number = [], [], [], []
    for k, record in enumerate(records):
        forest = shared_forest(record)
        lengths += forest.lengths.tolist()
        shared += forest.shared.tolist()
        ordered += [record[i] for i in forest.order]
        number += [k] * len(record)
    return budget.Costs(np.array(lengths), np.array(shared)), ordered, number


def distinct(members: list[int], ordered: list[np.ndarray], number: list[int]) -> int:
    """Prefixes of each record, counted one by one."""
    prefixes = {(number[i], *ordered[i][: k + 1].tolist()) for i in members for k in range(len(ordered[i]))}
    return len(prefixes)


@settings(max_examples=80)
@given(corpora(), st.integers(1, 40), st.randoms(use_true_random=False), st.sampled_from([0, 1, 2]))
def test_as_full_as_the_budget_allows(records, tokens: int, random, chunk: int) -> None:
    """Against a count of prefixes: nothing is lost, no step is too large, and none could have taken the next unit."""
    costs, ordered, number = costs_of(records)
    units: list[list[int]] = []
    begin = 0
    for record in records:
        size = chunk or len(record)
        units += [list(range(begin + a, begin + min(a + size, len(record)))) for a in range(0, len(record), size)]
        begin += len(record)
    random.shuffle(units)
    places = list(itertools.chain(*units))
    bounds = budget.cut(np.array(places), np.array([len(unit) for unit in units]), costs, tokens).tolist()
    assert bounds[0] == 0 and bounds[-1] == len(places) and bounds == sorted(set(bounds))
    batches = [places[a:b] for a, b in itertools.pairwise(bounds)]
    unit_of = {place: unit for unit in units for place in unit}
    for batch, following in zip(batches, [*batches[1:], []], strict=True):
        assert len(batch) == 1 or distinct(batch, ordered, number) <= tokens
        if following:
            unit = unit_of[following[0]]
            whole = distinct(unit, ordered, number) <= tokens
            assert unit[0] == following[0] or not whole  # only what is larger than a step is cut
            added = unit if whole else following[:1]
            assert distinct([*batch, *added], ordered, number) > tokens


def rows() -> list[dict[str, Any]]:
    """20 records that leave a common path at every step, some of them twice."""
    rng = np.random.default_rng(0)
    out = []
    for record in range(20):
        path = [f"step {record} {i} " + "x" * int(rng.integers(9)) for i in range(int(rng.integers(2, 9)))]
        for end in [*range(len(path)), *range(0, len(path), 2)]:
            steps = [*path[:end], f"wrong {len(out)}"] if end < len(path) - 1 else path
            labels = [1.0] * (len(steps) - 1) + [float(end == len(path) - 1)]
            out.append({"prompt": f"q{record}", "completions": steps, "labels": labels, "source": f"r{record}"})
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, make_rows, tokenizer):
    directory = tmp_path_factory.mktemp("corpus")
    path = make_rows(directory / "rows.jsonl", rows())
    return open_corpus(
        path, ReadConfig(), GranularityConfig(c_max=2), ENCODING, tokenizer, cache_dir=directory / "cache"
    )


def loader(corpus: Any, tokens: int, packing: str = "tree", chunk: int = 0, seed: int = 0, multiple: int = 1) -> Loader:
    options = PackingConfig(packing=packing, batch_tokens=tokens, record_chunk=chunk)
    stages = GranularityConfig(c_max=2, epochs_per_granularity=2)
    return Loader(corpus, stages, options, ENCODING, seed=seed, row_multiple=multiple)


@pytest.mark.parametrize(("packing", "chunk"), [("tree", 0), ("tree", 1), ("tree", 3), ("sequence", 1), ("none", 1)])
@pytest.mark.parametrize("tokens", [60, 400, 100_000])
def test_a_run_of_steps_by_cost(corpus, packing: str, chunk: int, tokens: int) -> None:
    """Every trajectory once a pass, and what a step computes is within the budget, but for a tree that a row cuts."""
    run = loader(corpus, tokens, packing, chunk)
    visited: dict[Any, list[str]] = collections.defaultdict(list)
    for k in range(run.num_steps):
        batch = run.batch(k)
        visited[batch.stage, batch.epoch] += batch.sources
        assert batch.trajectories <= run.trajectories == batch.packed.labels.shape[0]
        assert batch.trajectories == 1 or packing == "tree" or batch.tokens_computed <= tokens
    everything = sorted(corpus.source(1, i) for i in range(len(corpus[1])))
    assert sorted(visited[1, 0]) == sorted(visited[1, 1]) == everything
    if tokens == 100_000:
        assert run.num_steps == 4


def test_whole_records_until_the_step_is_full(corpus) -> None:
    """Records are cut only where they are larger than a step; steps hold the tokens that their trees have."""
    run = loader(corpus, 400)
    plan = BatchPlan(corpus, GranularityConfig(), "tree", 32, seed=0, record_chunk=0, batch_tokens=400)
    assert plan.num_steps > 5
    seen: collections.Counter[str] = collections.Counter()
    for k in range(plan.num_steps):
        records = collections.defaultdict(list)
        for g, i in plan.batch(k)[1]:
            records[corpus.source(g, i)].append(corpus[g][i].tokens)
        assert sum(shared_forest(record).size for record in records.values()) <= 400
        seen.update(records.keys())
    large = {
        corpus.source(1, int(a))
        for a, b in itertools.pairwise(corpus[1].record_starts)
        if shared_forest([corpus[1][i].tokens for i in range(a, b)]).size > 400
    }
    assert {record for record, times in seen.items() if times > 1} <= large
    assert len(seen) == 20
    computed = [run.batch(k).tokens_computed for k in range(run.num_steps)]
    assert np.mean(computed) > 240


def test_resume_devices_and_another_process(corpus) -> None:
    """Batch k depends on corpus, options, seed and k alone."""
    one, other = loader(corpus, 300), loader(corpus, 300, multiple=8)
    assert one.fingerprint == other.fingerprint and one.num_steps == other.num_steps
    assert one.fingerprint["batch_tokens"] == 300 and "batch_size" not in one.fingerprint
    for k in reversed(range(one.num_steps)):
        assert one.batch(k).sources == other.batch(k).sources
    iterator = one.iterator()
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = loader(corpus, 300).iterator()
    resumed.set_state(state)
    assert [b.sources for b in resumed] == [one.batch(k).sources for k in range(3, one.num_steps)]
    assert loader(corpus, 300, seed=1).batch(0).sources != one.batch(0).sources
