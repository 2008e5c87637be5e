"""The files of a grid, whichever cells it has."""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import pytest

from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import cell, report

CORRECT = np.arange(3 * 64).reshape(3, 64) % 2 == 0
SETS = [
    cell.TestSet(name, pathlib.Path(name), [], CORRECT, np.where(CORRECT, 0, -1), SplitCounts())
    for name in ("short", "long")
]


def write(directory, results) -> str:
    return report.write(directory, results, {"some": SETS}, "all", {})


@pytest.mark.parametrize(
    ("row", "accuracy"),
    [
        ("orm", {"plain": 0.5, "c2": 0.6}),
        ("orm", {"plain": 0.5}),
        ("bce", {"shuffled": 0.5}),  # which the figure does not have
        ("bce", {"plain": 0.5, "plain_matched": 0.6}),
    ],
)
def test_a_grid_of_one_row(make_results, tmp_path, row, accuracy) -> None:
    results = [one for one in make_results(levels=("some",), accuracy=accuracy) if one.cell.row == row]
    write(tmp_path, results)
    assert {path.name for path in tmp_path.iterdir()} == set(report.FILES)
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    written = json.loads((tmp_path / "results.json").read_text())
    assert {one["row"] for one in written["accuracies"]} == {row}


def test_results_are_kept_where_the_figure_cannot_be_drawn(make_results, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="matplotlib is missing"):
        write(tmp_path, make_results(levels=("some",)))
    assert {path.name for path in tmp_path.iterdir()} == set(report.FILES) - {"figure.png"}
