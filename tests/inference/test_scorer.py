"""Packed scores against one solution at a time; shapes, order, and what cannot be scored."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.config import PACKINGS, DeviceConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.errors import UserError
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import param_specs
from cfprm_jax.runtime import determinism
from cfprm_jax.sharding import rules


def test_a_deterministic_scorer_is_compiled_with_the_options_of_determinism(loaded, items, monkeypatch) -> None:
    """Shown by an option that XLA does not know, since on CPUs there are none."""
    monkeypatch.setattr(
        determinism, "compiler_options", lambda asked, platform: {"no_such_option": True} if asked else {}
    )
    assert Scorer(loaded).score(items[:1])[0] is not None
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        Scorer(loaded, deterministic=True).score(items[:1])


@pytest.fixture(scope="module")
def items(world):
    return [(q.question, c.steps) for q in read_candidates(world.candidates) for c in q.candidates]


@pytest.fixture(scope="module")
def expected(loaded, items):
    """Each solution alone in a row of its own, causal, at one length."""
    encoder = Encoder(loaded.tokenizer, loaded.encoding)
    forward = jax.jit(lambda *row: prm.apply(loaded.config, loaded.params, *row))
    out = []
    for question, steps in items:
        encoded = encoder.encode(question, steps)
        size = len(encoded.tokens)
        tokens = np.zeros((1, 96), np.int32)
        tokens[0, :size] = encoded.tokens
        column = np.arange(96, dtype=np.int32)
        end = np.where(column < size, size, column + 1).astype(np.int32)
        z = forward(tokens, column[None], end[None])
        out.append(np.asarray(z)[0, encoded.step_positions])
    return out


def agree(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_packing_scores_as_one_at_a_time(loaded, items, expected, packing):
    assert len({len(steps) for _, steps in items}) > 3
    scorer = Scorer(loaded, packing, batch_rows=4, row_length=96)
    agree(scorer.score(items), expected)


def test_order_is_kept_whatever_it_is(loaded, items, expected):
    order = np.random.default_rng(0).permutation(len(items))
    scorer = Scorer(loaded, batch_rows=2)
    agree(scorer.score([items[i] for i in order]), [expected[i] for i in order])


def test_compilations_are_few_whatever_comes(loaded, items):
    scorer = Scorer(loaded, batch_rows=4)
    assert scorer.shapes.all() == ((1, 128), (2, 128), (4, 128))
    for size in (1, 2, 3, 5, 8, 13, 21, 40, len(items)):
        scorer.score(items[:size])
    assert scorer.compilations == 3
    scorer.score(items[::-1])
    assert scorer.compilations == 3


def slots(scorer, items):
    """Tokens that batches have room for."""
    return sum(batch.rows[0].size for batch in scorer.plan(items).batches)


def test_trees_compute_fewer_rows_than_sequences(loaded, items):
    rows = {packing: slots(Scorer(loaded, packing, 1, 96), items) // 96 for packing in PACKINGS}
    assert rows["none"] == len(items)
    assert rows["tree"] < 0.7 * rows["sequence"] < 0.7 * rows["none"]


def test_rows_are_full_and_batches_have_no_empty_row(loaded, items):
    scorer = Scorer(loaded, batch_rows=6)
    encoded = [scorer.encoder.encode(*item).tokens for item in items]
    batches = scorer.plan(items).batches
    assert [len(batch.rows[0]) for batch in batches] == [6, 2, 1]
    assert all((batch.rows[0] != 0).any(axis=1).all() for batch in batches)
    # As many rows as the distinct tokens fill, and at most one more for each further question, none of which is cut up.
    questions = len({question for question, _ in items})
    assert slots(scorer, items) // 128 <= -(-shared_forest(encoded).size // 128) + questions - 1


def test_row_lengths_follow_the_solutions(loaded):
    wide = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=700))
    scorer = Scorer(wide, batch_rows=4)
    assert {length for _, length in scorer.shapes.all()} == {128, 256, 384, 512, 768}
    items = [("start=three", ["one+one=two"] * count) for count in (2, 5, 40, 90, 60)]
    lengths = [batch.rows[0].shape[1] for batch in scorer.plan(items).batches]
    assert set(lengths) <= {128, 256, 384}
    found = scorer.score(items)
    alone = [Scorer(wide, row_length=768, batch_rows=1).score([item])[0] for item in items]
    agree(found, alone)


def test_a_plan_is_the_same_again_and_scores_to_the_bit(loaded, items):
    scorer = Scorer(loaded, batch_rows=4)
    for one, other in zip(scorer.score(items), scorer.score(items), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_steps_and_too_long_are_not_scored(loaded, items, expected):
    question, steps = items[0]
    long = (question, ["zero+one=one"] * 30)
    found = Scorer(loaded).score([long, items[0], (question, []), (question + "+one" * 90, steps)])
    assert [one is None for one in found] == [True, False, True, True]
    agree([found[1]], [expected[0]])
    assert Scorer(loaded).score([]) == []


def test_rows_are_split_over_devices(loaded, items, expected):
    mesh = rules.make_mesh(DeviceConfig(mesh="data=2,fsdp=2"), jax.devices()[:4])
    shardings = rules.param_shardings(mesh, param_specs(loaded.config))
    placed = dataclasses.replace(loaded, params=jax.device_put(loaded.params, shardings))
    scorer = Scorer(placed, batch_rows=6, mesh=mesh)
    assert scorer.shapes.all() == ((4, 128), (8, 128))
    agree(scorer.score(items), expected)
    assert scorer.compilations <= 2


def test_bfloat16_computes_but_logits_are_float32(loaded, items, expected):
    half = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, dtype="bfloat16"))
    found = Scorer(half, batch_rows=2).score(items[:8])
    error = max(np.abs(one - other).max() for one, other in zip(found, expected[:8], strict=True))
    assert 0 < error < 0.5 and found[0].dtype == np.float32
    assert not all(np.array_equal(z, jnp.bfloat16(z).astype(np.float32)) for z in found)


def test_rows_shorter_than_the_longest_solution_are_refused(loaded):
    with pytest.raises(UserError, match="--row_length=64 is shorter than the model's max_length=96"):
        Scorer(loaded, row_length=64)
