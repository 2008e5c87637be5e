"""Metrics of the held-out split against their definitions."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.data.loader import Batch
from cfprm_jax.run import evaluation
from cfprm_jax.training import step


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0]), st.booleans()), min_size=1, max_size=30))
def test_auroc_is_the_share_of_pairs(pairs: list[tuple[float, bool]]) -> None:
    """Few distinct scores, so that most pairs are ties."""
    scores, truth = np.asarray([p[0] for p in pairs]), np.asarray([p[1] for p in pairs])
    wins = [(a > b) + 0.5 * (a == b) for a in scores[truth] for b in scores[~truth]]
    expected = np.mean(wins) if wins else float("nan")
    assert evaluation.auroc(scores, truth) == pytest.approx(expected, nan_ok=True)


def test_by_hand() -> None:
    """Two of three negatives found, one false alarm. A label of 0.5 is negative, 0.6 positive; z = 0 is negative."""
    z = np.asarray([3.0, 0.0, -1.0, 2.0, -2.0, 1.0])
    labels = np.asarray([1.0, 0.5, 0.0, 0.2, 0.6, 0.9])
    metrics = evaluation.binary_metrics(z, labels)
    assert metrics["step_accuracy"] == pytest.approx(4 / 6)
    assert metrics["negative_precision"] == pytest.approx(2 / 3)
    assert metrics["negative_recall"] == pytest.approx(2 / 3)
    assert metrics["negative_f1"] == pytest.approx(2 / 3)
    assert metrics["auroc"] == pytest.approx((3 + 0 + 2) / 9)
    assert (metrics["positives"], metrics["negatives"]) == (3, 3)


def test_what_has_no_value_is_nan() -> None:
    metrics = evaluation.binary_metrics(np.ones(4), np.ones(4))
    assert metrics["step_accuracy"] == 1.0
    for name in ("auroc", "negative_precision", "negative_recall", "negative_f1"):
        assert np.isnan(metrics[name])
    none_found = evaluation.binary_metrics(np.ones(2), np.asarray([1.0, 0.0]))
    assert none_found["negative_f1"] == 0.0
    assert np.isnan(none_found["negative_precision"])


def test_over_batches(setup, batch) -> None:
    """Loss and accuracy over two batches of different numbers of labels are those of all their steps together."""
    s = setup()
    state, hosts = s.init(), [batch(seed=1), batch(seed=2)]
    hosts[1].labels[4:] = np.nan
    evaluate = step.jit_eval_step(s.forward, s.loss, s.param_shardings, s.mesh)
    batches = [Batch(host, 1, 0, 0, (), 16, 1, 1) for host in hosts]
    metrics = evaluation.evaluate(evaluate, batches, s.batch_shardings, state.params)
    z = [np.asarray(jax.jit(lambda p, b: step.step_logits(s.forward, p, b))(state.params, s.put(h))) for h in hosts]
    z, labels = np.concatenate(z).astype(np.float64), np.concatenate([h.labels for h in hosts])
    known = ~np.isnan(labels)
    z, labels = z[known], labels[known]
    assert metrics is not None
    assert metrics["loss"] == pytest.approx(np.mean(np.logaddexp(0, z) - labels * z), rel=1e-5)
    assert metrics["step_accuracy"] == pytest.approx(np.mean((z > 0) == (labels > 0.5)))
    assert metrics["positives"] + metrics["negatives"] == known.sum()
    assert evaluation.evaluate(evaluate, [], s.batch_shardings, state.params) is None
    assert evaluation.evaluate(evaluate, batches, s.batch_shardings, state.params, lambda: True) is None


def test_distinct_steps_beside_all(setup, batch) -> None:
    """Their metrics are of the labels that stand at first occurrences."""
    s = setup()
    state, host = s.init(), batch(seed=1)
    evaluate = step.jit_eval_step(s.forward, s.loss, s.param_shardings, s.mesh)
    once = np.where(np.arange(host.labels.size).reshape(host.labels.shape) % 3 == 0, host.labels, np.nan)
    metrics = evaluation.evaluate(evaluate, [Batch(host, 1, 0, 0, (), 16, 1, 1, once)], s.batch_shardings, state.params)
    assert metrics is not None
    z = np.asarray(jax.jit(lambda p, b: step.step_logits(s.forward, p, b))(state.params, s.put(host)))
    for prefix, labels in (("", host.labels), ("distinct_", once)):
        known = ~np.isnan(labels)
        expected = evaluation.binary_metrics(z[known], labels[known])
        assert {name: metrics[f"{prefix}{name}"] for name in expected} == pytest.approx(expected, nan_ok=True)
    assert metrics["distinct_positives"] < metrics["positives"]
