"""The grid of the paper's experiments: losses by treatments by seeds, and what each cell trains.

A treatment is what training sees and in which order. "plain" is the baseline of the paper and "c2" its method;
"plain_matched", "shuffled" and "fine_to_coarse" are controls that separate the effect of windows from that of more
steps and from that of the order. The sweep over C adds one granularity each, as in the paper. The last ones measure
the cost of keeping the trajectories of a record together in tree packing, against --packing=sequence, which shuffles
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from cfprm_jax import config
from cfprm_jax.config import GranularityConfig
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import frontier, laboratory, oracle, rolled
from cfprm_jax.experiments.treatment import COMPUTE, MATCHED, Treatment

TREATMENTS = {
    "plain": Treatment("plain", ("1",)),
    "plain_matched": Treatment("plain, steps of C=2", ("1",), passes=2, steps=MATCHED),
    "c2": Treatment("C=2, then 1", ("2", "1"), steps=MATCHED),
    "c3": Treatment("C=3, then 1", ("3", "1"), steps=MATCHED),
    "c4": Treatment("C=4, then 1", ("4", "1"), steps=MATCHED),
    "shuffled": Treatment("C=2 and 1, shuffled", ("2", "1"), schedule="shuffled", steps=MATCHED),
    "fine_to_coarse": Treatment("1, then C=2", ("2", "1"), schedule="fine_to_coarse", steps=MATCHED),
    "grouped": Treatment("plain, records kept together", ("1",), packing="tree"),
    "grouped_4": Treatment("plain, 4 of a record kept together", ("1",), packing="tree", record_chunk=4),
    "plain_compute": Treatment("plain, compute of records kept together", ("1",), steps=COMPUTE),
    "plain_compute_4": Treatment("plain, compute of 4 kept together", ("1",), record_chunk=4, steps=COMPUTE),
}
GROUPING = ("grouped", "grouped_4", "plain_compute", "plain_compute_4")
"""Treatments that compare records kept together with trajectories shuffled one by one."""
CHOICES = tuple(name for name in TREATMENTS if name not in GROUPING)

SWEEP = {"plain": 1, "c2": 2, "c3": 3, "c4": 4}
"""The largest C of each treatment in the figure."""

ORM = "orm"
_TITLES = {"bce": "BCE", "mse": "MSE", "q_ranking": "Q-ranking"}
LOSSES = {name: _TITLES.get(name, name) for name in config.LOSSES}
ROWS = {ORM: "ORM", **LOSSES}
"""Rows of the table: the losses, and the outcome reward model, which is BCE on whole solutions."""
PAPER_ROWS = (ORM, *_TITLES)
"""Rows of the paper's table."""

# What an outcome model sees: the whole solution, and coarse to fine from there.
_ORM_TREATMENTS = {
    "plain": Treatment("plain", ("whole",)),
    "c2": Treatment("whole, C=2, then 1", ("whole", "2", "1")),
}


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One run: a level of redundancy (or the name of the real data), a row of the table, a treatment, a seed."""

    level: str
    row: str
    treatment: str
    seed: int

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.level}/{self.row}.{self.treatment}.{self.seed}"

    @property
    def loss(self) -> str:
        """As --loss."""
        return "bce" if self.row == ORM else self.row

    @property
    def what(self) -> Treatment:
        """What it trains on."""
        known = _ORM_TREATMENTS if self.row == ORM else {**TREATMENTS, **oracle.TREATMENTS, **rolled.TREATMENTS}
        return known[self.treatment] if self.treatment in known else frontier.treatment(self.treatment)

    @property
    def aggregation(self) -> str:
        """How a solution is judged: an outcome model by its last score, a process model by its lowest."""
        return "last" if self.row == ORM else "min"

    def granularity(self, base: GranularityConfig) -> GranularityConfig:
        """The options of its windows."""
        what = self.what
        return dataclasses.replace(
            base,
            c_max=1,
            granularities=what.granularities,
            epochs_per_granularity=what.passes * base.epochs_per_granularity,
            schedule=what.schedule,
        )


def cells(
    rows: Sequence[str],
    treatments: Sequence[str],
    levels: Sequence[str],
    seeds: Sequence[int],
    *,
    elsewhere: Sequence[str],
    packings: Sequence[str],
) -> list[Cell]:
    """Every cell, seed by seed, so that a run that is cut short has whole seeds.

    Args:
      levels: the first has every treatment, the others those of elsewhere (and no outcome model).
      elsewhere: treatments at the other levels.
      packings: rows for which grouping by record is compared with independent shuffling, at the first level.

    Raises:
      UserError: a name that is none, or one twice; no cell at all.
    """
    for flag, names, known in (
        ("--rows", rows, tuple(ROWS)),
        ("--treatments", treatments, CHOICES),
        ("--other_level_treatments", elsewhere, CHOICES),
        ("--grouping_rows", packings, tuple(LOSSES)),
        ("--levels", levels, None),
        ("--seeds", [str(seed) for seed in seeds], None),
    ):
        check_names(flag, names, known)
    out = []
    for seed in seeds:
        for level in levels:
            first = level == levels[0]
            for row in rows:
                if row == ORM:
                    chosen = [t for t in treatments if t in _ORM_TREATMENTS] if first else []
                else:
                    chosen = [*treatments, *(GROUPING if row in packings else ())] if first else list(elsewhere)
                out += [Cell(level, row, treatment, seed) for treatment in chosen]
    return not_empty(out, "--rows, --treatments, --levels, --other_level_treatments and --seeds")


def frontier_cells(
    rows: Sequence[str], levels: Sequence[str], seeds: Sequence[int], axes: frontier.FrontierConfig
) -> list[Cell]:
    """Every cell of the frontier, seed by seed. Outcome models have none.

    Raises:
      UserError: a name that is none, or one twice; a value that an axis does not have; no cell at all.
    """
    return _product(
        rows,
        levels,
        seeds,
        lambda _, row: frontier.treatments(axes, row),
        flags="--rows, --levels, --seeds, --label_weights and --negative_weights",
    )


def oracle_cells(rows: Sequence[str], levels: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every cell of the windows from exact redundancy, seed by seed. Outcome models have none.

    A level without redundancy has no windows that could be exact, so it has only what needs none.

    Raises:
      UserError: a name that is none, or one twice; no cell at all.
    """

    def possible(level: str, _: str) -> list[str]:
        redundant = any(laboratory.LEVELS[level])
        return [name for name, what in oracle.TREATMENTS.items() if redundant or not what.training_rows]

    return _product(rows, levels, seeds, possible)


def label_cells(rows: Sequence[str], levels: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Every cell of the kinds of labels, seed by seed. Outcome models have none.

    Raises:
      UserError: a name that is none, or one twice; no cell at all.
    """
    return _product(rows, levels, seeds, lambda *_: rolled.TREATMENTS)


def search_cells(rows: Sequence[str], levels: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """The reward models that search is compared with: plain and C=2, of as many steps, seed by seed.

    Raises:
      UserError: a name that is none, or one twice; no cell at all.
    """
    return _product(rows, levels, seeds, lambda *_: ("plain_once", "c2_once"))


def _product(
    rows: Sequence[str],
    levels: Sequence[str],
    seeds: Sequence[int],
    treatments: Callable[[str, str], Iterable[str]],
    *,
    flags: str = "--rows, --levels and --seeds",
) -> list[Cell]:
    """Every cell of losses, seed by seed; treatments gives the names of a level and a row.

    Args:
      flags: that the cells follow from, for the error.

    Raises:
      UserError: a row that is no loss, or a name that is there twice; no cell at all.
    """
    check_names("--rows", rows, tuple(LOSSES))
    check_names("--levels", levels, None)
    check_names("--seeds", [str(seed) for seed in seeds], None)
    out = [
        Cell(level, row, name, seed)
        for seed in seeds
        for level in levels
        for row in rows
        for name in treatments(level, row)
    ]
    return not_empty(out, flags)


def not_empty(found: list[Cell], flags: str) -> list[Cell]:
    """The cells. UserError if there are none, of which there would be no report."""
    if not found:
        raise UserError(f"{flags} leave no cell")
    return found


def check_names(flag: str, names: Sequence[str], known: Sequence[str] | None) -> None:
    """UserError for a name that is not known, or is there twice."""
    for name in names:
        if known is not None and name not in known:
            raise UserError(f"{flag}: {name!r} is not among: {', '.join(known)}")
    if len(set(names)) != len(names):
        raise UserError(f"{flag}={','.join(names)} names something twice")
