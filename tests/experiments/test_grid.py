"""Which cells there are, and what they train."""

from __future__ import annotations

import collections

import pytest

from cfprm_jax.config import GranularityConfig
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.grid import Cell, cells

ALL = ("plain", "plain_matched", "c2", "c3", "c4", "shuffled", "fine_to_coarse")


def test_the_papers_grid():
    grid = cells(
        ("orm", "bce", "mse", "q_ranking"), ALL, ("some", "none"), (0, 1), elsewhere=("plain", "c2"), packings=("bce",)
    )
    assert len(set(grid)) == len(grid) == 2 * (2 + 3 * 7 + 4 + 3 * 2)
    assert [cell.seed for cell in grid] == sorted(cell.seed for cell in grid), "whole seeds first"
    counts = collections.Counter((cell.level, cell.row) for cell in grid if cell.seed == 0)
    assert counts == {
        ("some", "orm"): 2,
        ("some", "bce"): 11,
        ("some", "mse"): 7,
        ("some", "q_ranking"): 7,
        ("none", "bce"): 2,
        ("none", "mse"): 2,
        ("none", "q_ranking"): 2,
    }
    assert len({cell.name for cell in grid}) == len(grid)


@pytest.mark.parametrize(
    ("treatment", "stages", "schedule", "epochs"),
    [
        ("plain", (1,), "coarse_to_fine", 1),
        ("plain_matched", (1,), "coarse_to_fine", 2),
        ("c2", (2, 1), "coarse_to_fine", 1),
        ("c3", (3, 1), "coarse_to_fine", 1),
        ("c4", (4, 1), "coarse_to_fine", 1),
        ("shuffled", (2, 1), "shuffled", 1),
        ("fine_to_coarse", (2, 1), "fine_to_coarse", 1),
    ],
)
def test_what_a_treatment_trains(treatment, stages, schedule, epochs):
    cell = Cell("some", "mse", treatment, 0)
    found = cell.granularity(GranularityConfig())
    assert (found.stages, found.schedule, found.epochs_per_granularity) == (stages, schedule, epochs)
    assert (cell.loss, cell.aggregation) == ("mse", "min")
    assert cell.granularity(GranularityConfig(epochs_per_granularity=3)).epochs_per_granularity == 3 * epochs


def test_the_outcome_model():
    plain, coarse = (Cell("some", "orm", treatment, 0) for treatment in ("plain", "c2"))
    assert plain.granularity(GranularityConfig()).stages == ("whole",)
    assert coarse.granularity(GranularityConfig()).stages == ("whole", 2, 1)
    assert (plain.loss, plain.aggregation) == ("bce", "last")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": ("bce", "bce")}, "--rows=bce,bce names something twice"),
        ({"treatments": ("c5",)}, "--treatments: 'c5' is not among: plain"),
        ({"treatments": ("grouped",)}, "is not among"),
        ({"packings": ("orm",)}, "--grouping_rows: 'orm' is not among: bce, mse, q_ranking"),
        ({"seeds": (1, 1)}, "--seeds=1,1 names something twice"),
    ],
)
def test_names_that_are_none(change, message):
    options = {
        "rows": ("bce",),
        "treatments": ("plain",),
        "levels": ("some",),
        "seeds": (0,),
        "elsewhere": (),
        "packings": (),
    }
    with pytest.raises(UserError, match=message):
        cells(**{**options, **change})
