"""Results of a grid that was never run, with known differences."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.experiments.grid import Cell
from cfprm_jax.experiments.runner import CellResult

SIZES = (8, 64)


@pytest.fixture
def make_results():
    """(levels, treatment -> accuracy, seeds) -> the results of all rows of the table on two test sets."""

    def make(levels=("some", "none", "much"), accuracy=None, seeds=(0, 1, 2), questions=200):
        accuracy = accuracy or {"plain": 0.5, "plain_matched": 0.6, "c2": 0.6}
        rng = np.random.default_rng(0)
        hard = {test: rng.random(questions) for test in ("short", "long")}
        out = []
        for seed in seeds:
            for level in levels:
                for row in ("orm", "bce", "q_ranking"):
                    for treatment, share in accuracy.items():
                        if row == "orm" and treatment not in ("plain", "c2"):
                            continue
                        right = {}
                        for test, hardness in hard.items():
                            noise = rng.normal(0, 0.05, (questions, len(SIZES)))
                            values = (hardness[:, None] + noise < share).astype(float)
                            right |= {f"{test}/{a}/{s}": values for a in ("min", "last") for s in ("all", "first")}
                        cell = Cell(level, row, treatment, seed)
                        summary = {"n": list(SIZES), "steps": 10, "tokens": 1000}
                        out.append(CellResult(cell, summary, right))
        return out

    return make
