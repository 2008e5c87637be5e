"""Aggregations of step scores, by hand and against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cfprm_jax.config import AGGREGATIONS
from cfprm_jax.data.candidates import Candidate
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.aggregation import aggregate, log_sigmoid, rank


def candidate(scores, logits=None):
    return Candidate(
        text="",
        step_scores=None if scores is None else np.asarray(scores, np.float64),
        step_logits=None if logits is None else np.asarray(logits, np.float64),
    )


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def test_aggregation_in_numbers():
    plain = aggregate([candidate([0.2, 0.5]), candidate([0.9])], AGGREGATIONS, "c.jsonl:1")
    for name, value in {"min": 0.2, "last": 0.5, "product": math.log(0.1), "mean": 0.35}.items():
        assert plain[name][0][0] == pytest.approx(value, rel=1e-14)
        assert plain[name][1][0] == pytest.approx(math.exp(value) if name == "product" else value, rel=1e-14)
    z = [-2.0, 1.0]
    p = [sigmoid(value) for value in z]
    raw = aggregate([candidate(p, logits=z)], AGGREGATIONS, "c.jsonl:1")
    expected = {"min": (-2.0, p[0]), "last": (1.0, p[1]), "mean": (sum(p) / 2, sum(p) / 2)}
    for name, (order, weight) in {**expected, "product": (math.log(p[0] * p[1]), p[0] * p[1])}.items():
        assert (raw[name][0][0], raw[name][1][0]) == pytest.approx((order, weight), rel=1e-14)


def test_a_product_with_a_score_of_zero_is_zero():
    pool = [candidate(p) for p in ([0.0, 0.5], [0.9, 0.0, 0.0], [1e-300] * 3, [5e-324], None, [0.0], [1.0, 1.0])]
    ranks, weights = aggregate(pool, ["product"], "c.jsonl:1")["product"]
    # Below the smallest product, a tie with other zeros, and above a candidate without scores.
    assert ranks[0] == ranks[1] == ranks[5] and np.isfinite(ranks[0])
    assert ranks[4] == -np.inf < ranks[0] < ranks[2] < ranks[3] < ranks[6] == 0
    assert ranks[2] == pytest.approx(3 * math.log(1e-300), rel=1e-14)
    np.testing.assert_array_equal(weights, [0, 0, 0, 5e-324, 0, 0, 1])
    # Where logits are known a sigmoid that rounds to 0 is none.
    ranks, _ = aggregate([candidate([0.0], logits=[-800.0]), candidate([0.0], logits=[-900.0])], ["product"], "c")[
        "product"
    ]
    assert ranks.tolist() == [-800.0, -900.0]


def test_an_unknown_aggregation_is_an_error():
    with pytest.raises(UserError, match="aggregation 'median' is none of min, last, product, mean"):
        aggregate([candidate([0.5])], ["min", "median"], "c.jsonl:1")
    with pytest.raises(UserError, match="aggregation 'median'"):
        aggregate([candidate(None)], ["median"], "c.jsonl:1")


def test_huge_logits_stay_finite():
    out = aggregate([candidate([0.0, 1.0], logits=[-1e4, 1e4])], AGGREGATIONS, "c.jsonl:1")
    assert out["product"][0][0] == -1e4 and out["min"][0][0] == -1e4
    assert all(np.isfinite(ranks).all() and (weights >= 0).all() for ranks, weights in out.values())


def test_ranks_of_logits_are_those_of_candidates_with_logits() -> None:
    rng = np.random.default_rng(0)
    logits = [rng.normal(0, 8, size).astype(np.float32) for size in (3, 1, 7)]
    given = [*logits, None, logits[0][:0]]
    scores = [None if z is None else 1 / (1 + np.exp(-z.astype(np.float64))) for z in given]
    candidates = [candidate(p, None if z is None else z) for p, z in zip(scores, given, strict=True)]
    for name, (expected, _) in aggregate(candidates, AGGREGATIONS, "c.jsonl:1").items():
        found = rank(given, name)
        np.testing.assert_allclose(found, expected, rtol=1e-13)
        assert found.dtype == np.float64 and found[3] == found[4] == -np.inf
    assert rank([None], "min").tolist() == [-np.inf] and rank([], "min").shape == (0,)
    with pytest.raises(UserError, match="aggregation 'median'"):
        rank(logits, "median")


def test_products_of_float32_logits_are_summed_in_float64() -> None:
    """In float32, log sigmoid(20) = -2.06e-9 is lost beside log sigmoid(-1)."""
    z = np.array([-1.0, 20.0], np.float32)
    assert log_sigmoid(z).dtype == np.float64
    np.testing.assert_allclose(rank([z], "product"), [-np.logaddexp(0, 1.0) - np.logaddexp(0, -20.0)], rtol=1e-14)
    assert rank([z], "product")[0] < rank([z[:1]], "product")[0]
