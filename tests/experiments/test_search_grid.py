"""Search against Best-of-N: settings, the comparison at equal cost, and the report."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.experiments import search_report
from cfprm_jax.experiments.grid import search_cells
from cfprm_jax.experiments.search_runner import SearchGridConfig, SearchResult
from cfprm_jax.experiments.treatment import MATCHED


def test_settings() -> None:
    found = SearchGridConfig(search_n=("2", "4", "8"), search_granularities=("1", "3")).settings
    # A beam of 4 with width 4 keeps one of four: greedy search, which is not asked for. Trees of 4 are one tree.
    assert list(found) == [
        *("best_of_n.n2", "best_of_n.n4", "best_of_n.n8", "beam.n8.g1", "beam.n8.g3"),
        *("dvts.n4.g1", "dvts.n4.g3", "dvts.n8.g1", "dvts.n8.g3"),
    ]
    assert (found["beam.n8.g3"].n, found["beam.n8.g3"].width, found["beam.n8.g3"].granularity) == (8, 4, 3)
    with pytest.raises(UserError, match="leave no setting"):
        SearchGridConfig(search_methods=("beam",), search_n=("4",)).settings  # noqa: B018
    with pytest.raises(UserError, match="--search_n: 'many'"):
        SearchGridConfig(search_n=("many",)).settings  # noqa: B018


def test_reward_models_have_as_many_steps() -> None:
    grid = search_cells(("bce",), ("some",), (0, 1))
    assert [(cell.treatment, cell.seed) for cell in grid] == [
        ("plain_once", 0), ("c2_once", 0), ("plain_once", 1), ("c2_once", 1),
    ]  # fmt: skip
    assert all(cell.what.steps == MATCHED for cell in grid)


def test_at_cost() -> None:
    """Interpolated in the logarithm, per seed and question; nothing beyond the ends."""
    low, high = np.zeros((2, 3)), np.ones((2, 3))
    points = [(800.0, high), (50.0, low), (200.0, low)]
    np.testing.assert_allclose(search_report.at_cost(points, 400.0), 0.5)
    np.testing.assert_allclose(search_report.at_cost(points, 100.0), 0.0)
    np.testing.assert_allclose(search_report.at_cost(points, 800.0), 1.0)
    assert search_report.at_cost(points, 801.0) is None and search_report.at_cost(points, 49.0) is None
    assert search_report.at_cost([], 1.0) is None


def test_the_report(tmp_path) -> None:
    """A beam as dear as Best-of-4 that gets 10 points more is 10 points better at equal cost, paired."""
    done = []
    for cell in search_cells(("bce",), ("some",), (0, 1, 2, 3)):
        if (cell.treatment, cell.seed) == ("c2_once", 3):  # not done yet, so the other cell of this seed does not count
            continue
        noise = np.random.default_rng(cell.seed).random(50) / 10
        arrays = {}
        for test in ("short", "long"):
            for setting, right, policy, reward in (
                ("best_of_n.n2", 0.4, 100, 60),
                ("best_of_n.n4", 0.5, 200, 120),
                ("best_of_n.n8", 0.6, 400, 240),
                ("beam.n8.g2", 0.6, 150, 170),
                ("beam.n16.g2", 0.7, 1500, 170),
            ):
                key = f"{test}/{setting}"
                # Windows help the beam by 2 points on short problems and by 6 on long ones; seed 3 is an outlier.
                more = {"short": 0.02, "long": 0.06}[test] * (cell.treatment == "c2_once") * setting.startswith("beam")
                arrays[f"right/{key}"] = right + noise + more + (cell.seed == 3)
                arrays[f"policy/{key}"], arrays[f"reward/{key}"] = np.full(50, policy), np.full(50, reward)
        done.append(SearchResult(cell, {"steps": 10, "tokens": 100}, arrays))
    outcomes = search_report.outcomes(search_report.settings(done))
    found = {(one.treatment, one.test, one.setting): one for one in outcomes}
    beam = found["c2_once", "long", "beam.n8.g2"]
    assert beam.cost == 320 and beam.difference is not None
    assert beam.difference.mean == pytest.approx(0.16) and beam.difference.low == pytest.approx(0.16)
    assert found["plain_once", "short", "beam.n16.g2"].difference is None  # dearer than all of Best-of-N
    assert found["plain_once", "short", "best_of_n.n4"].difference is None
    text = search_report.write(tmp_path, done, {})
    # Means: a beam of 16 is beyond the costs of Best-of-N, and counts between reward models only.
    assert "+10.0 [10.0, 10.0]" in text and {p.name for p in tmp_path.iterdir()} == set(search_report.FILES)
    written = json.loads((tmp_path / "search.json").read_text())
    assert len(written["settings"]) == 2 * 2 * 5
    plain, windows = written["against_best_of_n"]
    assert (plain["method"], plain["settings"], windows["settings"]) == ("beam, g=2", 2, 2)
    assert plain["difference"]["mean"] == pytest.approx(0.1) and windows["difference"]["mean"] == pytest.approx(0.14)
    same, more = written["between_reward_models"]
    assert (same["method"], same["settings"], same["difference"]["mean"]) == ("best_of_n", 6, pytest.approx(0.0))
    assert (more["method"], more["settings"], more["difference"]["mean"]) == ("beam, g=2", 4, pytest.approx(0.04))
