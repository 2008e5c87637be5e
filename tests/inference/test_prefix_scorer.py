"""Scores with kept prefixes against the packed scorer's, and how many tokens are computed."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.inference.prefix_rows import Lengths, Tokens
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models.parameters import init_params, param_specs
from cfprm_jax.sharding import rules


@pytest.fixture(scope="module")
def items(world):
    """Six solutions of each of two questions."""
    return [(q.question, c.steps) for q in list(read_candidates(world.candidates))[:2] for c in q.candidates[:6]]


@pytest.fixture(scope="module")
def expected(loaded, items):
    return Scorer(loaded).score(items)


def agree(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def prefixes(items):
    """The requests of a search: all solutions up to their first step, then up to their second, ..."""
    for depth in range(1, 1 + max(len(steps) for _, steps in items)):
        yield [(question, steps[:depth]) for question, steps in items if len(steps) >= depth]


def test_step_by_step_equals_at_once(loaded, items, expected) -> None:
    """With a cache that holds a part of what would be used again."""
    scorer = PrefixScorer(loaded, 150)
    for requested in prefixes(items):
        found = scorer.score(requested)
        wanted = [z for (_, steps), z in zip(items, expected, strict=True) if len(steps) >= len(requested[0][1])]
        agree(found, [z[: len(steps)] for z, (_, steps) in zip(wanted, requested, strict=True)])
        assert scorer.cached_tokens <= 150
    agree(scorer.score(items), expected)


def test_each_distinct_token_is_computed_once(loaded, items, expected) -> None:
    scorer, items = PrefixScorer(loaded, 1 << 14), items[:6]
    for requested in prefixes(items):
        scorer.score(requested)
    encoded = scorer.encoder.encode_many([(question, steps, None) for question, steps in items])
    distinct = {tuple(e.tokens[: n + 1].tolist()) for e in encoded for n in range(len(e.tokens))}
    assert scorer.counts.computed == len(distinct) == scorer.cached_tokens
    before, shapes = dataclasses.replace(scorer.counts), len(scorer.shapes)
    agree(scorer.score(items), expected[:6])
    assert scorer.counts.computed == before.computed
    assert scorer.counts.reused == before.reused + sum(len(e.tokens) for e in encoded)
    # Shapes depend on lengths alone.
    scorer.clear()
    assert scorer.cached_tokens == 0
    for requested in prefixes(items):
        scorer.score(requested)
    assert len(scorer.shapes) == shapes


def test_a_forty_step_beam_costs_a_fifth_of_scoring_afresh(loaded) -> None:
    """Four beams of four continuations, the best four kept, at each of 40 steps; tokens, not seconds."""
    loaded = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=512))
    scorer, question, afresh = PrefixScorer(loaded, 1 << 14), "start=four-one", 0
    beams: list[list[str]] = [[]] * 4
    for depth in range(40):
        proposed = [[*beam, f"four+{number}={beams.index(beam)}"] for beam in beams for number in ("one", "two")]
        proposed = [[*steps, f"so={depth % 7}"] for steps in proposed]
        scores = scorer.score([(question, steps) for steps in proposed])
        encoded = scorer.encoder.encode_many([(question, steps, None) for steps in proposed])
        # Scored afresh, the solutions of one call still share their prefixes.
        afresh += len({tuple(e.tokens[: n + 1].tolist()) for e in encoded for n in range(len(e.tokens))})
        beams = [proposed[i] for i in np.argsort([-z[-1] for z in scores], kind="stable")[:4]]
    assert len(beams[0]) == 80
    assert 5 * scorer.counts.computed < afresh < scorer.counts.requested
    requested = [(question, steps) for steps in beams]
    agree(scorer.score(requested), PrefixScorer(loaded, 0).score(requested))


def test_lengths() -> None:
    lengths = Lengths.covering(4000)
    assert lengths.new == (32, 64, 128, 256, 512, 1024, 2048, 4096) and lengths.cached == (0, 256, 1024, 4096)
    assert lengths.holding(33, 0) == (64, 0) and lengths.holding(1, 257) == (32, 1024)


def test_positions_may_be_anywhere(loaded) -> None:
    scorer = PrefixScorer(loaded, 64)
    tokens = np.arange(3, 13, dtype=np.int32)
    every = scorer.outputs([Tokens(tokens, np.arange(10, dtype=np.int32))])[0]
    some = scorer.outputs([Tokens(tokens[:8], np.array([2, 7], np.int32)), Tokens(tokens, np.array([9], np.int32))])
    np.testing.assert_array_equal(some[0], every[[2, 7]])
    np.testing.assert_array_equal(some[1], every[[9]])


def test_long_queries_go_in_blocks(loaded, monkeypatch) -> None:
    """200 new tokens after a cached prefix."""
    tokens = np.random.default_rng(0).integers(3, 18, 240).astype(np.int32)
    loaded = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=256))
    whole = PrefixScorer(loaded, 0).outputs([Tokens(tokens, np.array([10, 150, 239], np.int32))])
    scorer = PrefixScorer(loaded, 512)
    scorer.outputs([Tokens(tokens[:40], np.array([39], np.int32))])
    found = scorer.outputs([Tokens(tokens, np.array([10, 150, 239], np.int32))])
    assert scorer.counts.computed == 240
    agree(found, whole)


def test_a_redundancy_output_comes_beside(loaded, items) -> None:
    config = dataclasses.replace(loaded.config, redundancy=True)
    loaded = dataclasses.replace(loaded, config=config, params=init_params(config, jax.random.key(1)))
    packed = Scorer(loaded, batch_rows=1)
    wanted = packed.start(packed.plan(items[:5])).outputs()
    scorer = PrefixScorer(loaded, 1 << 10)
    encoded = [
        Tokens(e.tokens, e.step_positions) for e in scorer.encoder.encode_many([(*item, None) for item in items[:5]])
    ]
    agree(scorer.outputs(encoded), wanted)
    agree(scorer.outputs(encoded), wanted)


def test_on_a_mesh(loaded, items, expected) -> None:
    backbone = dataclasses.replace(loaded.config.backbone, vocab_size=312)
    config = dataclasses.replace(loaded.config, backbone=backbone)
    mesh = rules.make_mesh(DeviceConfig(mesh="data=2,fsdp=1,tensor=2"), jax.devices()[:4])
    params = jax.tree.map(lambda x: x, loaded.params)
    params["backbone"]["embedding"] = np.pad(loaded.params["backbone"]["embedding"], ((0, 1), (0, 0)))
    params = jax.device_put(params, rules.param_shardings(mesh, param_specs(config)))
    loaded = dataclasses.replace(loaded, config=config)
    scorer = PrefixScorer(dataclasses.replace(loaded, params=params), 1 << 12, mesh=mesh)
    scorer.score([(question, steps[:2]) for question, steps in items[:2]])
    agree(scorer.score(items[:2]), expected[:2])
