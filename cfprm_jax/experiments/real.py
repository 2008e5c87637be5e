"""The grid of --grid=real: real weights and labels, lower layers frozen and computed once.

Treatments differ in what an optimizer step sees. "expanded" is the usual training set, every label of every
trajectory, shuffled one by one; "each_once" has whole records in a batch and counts each distinct step once, with as
many computed tokens. "c2" adds a stage of windows of two steps before it, and "plain_matched" is "each_once" for as
many steps as that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cfprm_jax.experiments.grid import ORM, ROWS, Cell, check_names, not_empty
from cfprm_jax.experiments.treatment import ALL, COMPUTE, MATCHED, Treatment
from cfprm_jax.options import Options, option

LEVEL = "real"
"""Level of the cells, which names their directory."""

_ONCE = Treatment("each label once", ("1",), packing="tree", label_weight="node")
TREATMENTS = {
    "expanded": Treatment(
        "expanded, shuffled", ("1",), packing="sequence", record_chunk=1, steps=COMPUTE, label_weight="trajectory"
    ),
    "each_once": _ONCE,
    "c2": dataclasses.replace(_ONCE, title="C=2, then 1", granularities=("2", "1")),
    "plain_matched": dataclasses.replace(_ONCE, title="each label once, steps of C=2 then 1", steps=MATCHED),
}
"""The treatments, with every label of every trajectory or with each label once."""

ORM_TREATMENTS = {
    "expanded": dataclasses.replace(TREATMENTS["expanded"], granularities=("whole",)),
    "each_once": dataclasses.replace(_ONCE, granularities=("whole",)),
    "c2": dataclasses.replace(_ONCE, title="whole, C=2, then 1", granularities=("whole", "2", "1"), steps=ALL),
}
"""What they are for the outcome model, which sees whole solutions."""

CONTRASTS = (("each_once", "expanded"), ("c2", "each_once"), ("c2", "plain_matched"))
"""Pairs of treatments that are compared: as many tokens, twice the steps, as many steps."""


@dataclasses.dataclass(frozen=True)
class RealConfig(Options):
    """Data of --grid=real."""

    real_treatments: tuple[str, ...] = option(
        tuple(TREATMENTS), "Training treatments of --grid=real.", choices=tuple(TREATMENTS), kind="list"
    )
    train_records: int = option(300, "Number of training records, the first ones; 0 is all.", lower=0, upper=1 << 30)
    record_tokens: int = option(
        0,
        "Training records with more distinct tokens are left out; 0 is no limit.",
        lower=0,
        upper=1 << 30,
    )
    train_tokens_per_seed: int = option(
        0,
        "Distinct tokens of the records that one cell trains on, drawn with its seed: bounds the cost of a cell. 0 is "
        "all records.",
        lower=0,
        upper=1 << 30,
    )
    heldout_data: tuple[str, ...] = option((), "Held-out corpora, for metrics over distinct steps.", kind="list")
    heldout_records: int = option(100, "Number of held-out records, the first ones; 0 is all.", lower=0, upper=1 << 30)
    heldout_record_tokens: int = option(0, "As --record_tokens, of held-out records.", lower=0, upper=1 << 30)
    pool: str = option("", 'Candidates with "correct", for Best-of-N with the values of --n.')
    pool_questions: int = option(
        60, "Number of questions of --pool, at even distances in the file; 0 is all.", lower=0, upper=1 << 30
    )
    process_bench: tuple[str, ...] = option(
        (),
        'ProcessBench files. A row is of the subset that its "subset" names, or else its id before the number '
        "(gsm8k-12), or else the name of its file; F1 is computed for each subset.",
        kind="list",
    )
    process_bench_solutions: int = option(
        100, "Number of solutions of each subset, at even distances in it; 0 is all.", lower=0, upper=1 << 30
    )
    resamples: int = option(2000, "Resamples of the bootstrap over records.", lower=100, upper=10**6)


def what(cell: Cell) -> Treatment:
    """What a cell trains on."""
    return (ORM_TREATMENTS if cell.row == ORM else TREATMENTS)[cell.treatment]


def real_cells(rows: Sequence[str], treatments: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every cell, seed by seed, so that a run that is cut short has whole seeds.

    Raises:
      UserError: a name that is none, or one twice; no cell at all.
    """
    check_names("--rows", rows, tuple(ROWS))
    check_names("--real_treatments", treatments, tuple(TREATMENTS))
    check_names("--seeds", [str(seed) for seed in seeds], None)
    found = [
        Cell(LEVEL, row, treatment, seed)
        for seed in seeds
        for row in rows
        for treatment in treatments
        if row != ORM or treatment in ORM_TREATMENTS
    ]
    return not_empty(found, "--rows, --real_treatments and --seeds")
