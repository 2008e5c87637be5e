"""Families of differences: which there are, and what they find in results that are known."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.experiments.contrasts import Results, families


def by_key(results):
    return {family.key: family for family in families(Results(results, "all"))}


def test_the_families_that_have_cells(make_results):
    found = by_key(make_results())
    assert list(found) == ["paper", "steps", "windows", "windows_none", "windows_much", "redundancy"]
    assert [(d.row, d.test) for d in found["paper"].differences] == [
        (row, test) for row in ("orm", "bce", "q_ranking") for test in ("short", "long")
    ]
    assert {d.row for d in found["windows"].differences} == {"bce", "q_ranking"}
    everything = {"plain": 0.5, "plain_matched": 0.6, "c2": 0.6, "c3": 0.6, "c4": 0.6, "shuffled": 0.6}
    everything |= {"fine_to_coarse": 0.6, "grouped": 0.4, "grouped_4": 0.45, "plain_compute": 0.4}
    keys = set(by_key(make_results(levels=("some",), accuracy=everything)))
    assert keys == {
        *("paper", "steps", "windows", "order", "reverse", "sweep"),
        *("grouping", "grouping_4", "grouping_compute"),
    }


def test_known_differences_are_found(make_results):
    found = by_key(make_results())
    for key, truth in (("paper", 0.1), ("steps", 0.1), ("windows", 0.0)):
        for difference in found[key].differences:
            e = difference.estimate
            assert abs(e.mean - truth) < 0.05 and e.low - 0.02 < truth < e.high + 0.02
        assert found[key].pooled.low < truth < found[key].pooled.high
    assert all(d.estimate.sign == 1 for d in found["steps"].differences)
    assert all(d.estimate.sign == 0 for d in found["windows"].differences)


def test_differences_are_paired_and_means_of_means(make_results):
    results = Results(make_results(), "all")
    family = next(f for f in families(results) if f.key == "steps")
    first = family.differences[0]
    gain = results.mean("some", "bce", "plain_matched", "short") - results.mean("some", "bce", "plain", "short")
    assert first.estimate.mean == pytest.approx(gain.mean())
    assert first.estimate.deviation == pytest.approx(gain.mean(axis=1).std(ddof=1))
    assert family.pooled.mean == pytest.approx(np.mean([d.estimate.mean for d in family.differences]))


def test_the_sweep_is_pooled_over_its_treatments_too(make_results):
    accuracy = {"c2": 0.6, "c3": 0.5, "c4": 0.3}
    family = by_key(make_results(levels=("some",), accuracy=accuracy))["sweep"]
    assert {d.treatment for d in family.differences} == {"c3", "c4"}
    assert family.pooled.mean == pytest.approx(np.mean([d.estimate.mean for d in family.differences]))
    assert family.pooled.mean == pytest.approx(-0.2, abs=0.05)


def test_a_pooled_mean_weighs_test_sets_alike(make_results):
    results = make_results(levels=("some",))
    for result in results:  # a test set of a quarter of the questions
        for name in result.right:
            if name.startswith("long"):
                result.right[name] = result.right[name][:50]
    family = by_key(results)["steps"]
    assert family.pooled.mean == pytest.approx(np.mean([d.estimate.mean for d in family.differences]))


def test_the_outcome_model_is_judged_by_its_last_score(make_results):
    results = make_results(levels=("some",))
    for result in results:
        result.right["short/min/all"] = np.zeros_like(result.right["short/min/all"])
    found = Results(results, "all")
    assert found.mean("some", "orm", "plain", "short").mean() > 0.4
    assert found.mean("some", "bce", "plain", "short").mean() == 0
    assert Results(results, "first").mean("some", "bce", "plain", "short").mean() > 0.4
