"""All options of `experiment`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from cfprm_jax import options
from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    EvalConfig,
    FrozenConfig,
    GranularityConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ReadConfig,
    RunConfig,
)
from cfprm_jax.experiments.cell import SUBSETS
from cfprm_jax.experiments.frontier import FrontierConfig
from cfprm_jax.experiments.grid import CHOICES, LOSSES, ORM, PAPER_ROWS, ROWS
from cfprm_jax.experiments.laboratory import LEVELS, LaboratoryConfig
from cfprm_jax.experiments.real import RealConfig
from cfprm_jax.experiments.runner import LABORATORY
from cfprm_jax.experiments.search_runner import SearchGridConfig
from cfprm_jax.options import Options, option
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import validate_options, validate_training

# Grids whose rows are losses, without the outcome model.
_GRIDS_OF_LOSSES = ("frontier", "oracle", "labels", "search")


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(Options):
    """Run the paper's experiments: a grid of losses, treatments and seeds, each trained, scored and evaluated.

    python -m cfprm_jax.experiment --flagfile=configs/lab/paper.flags

    Writes a directory per cell, and table2.md, table2.tex, controls.md, figure.png, findings.md and results.json (with
    --grid=frontier: frontier.md, frontier.png and frontier.json; with oracle, labels or search: files of that name;
    with real: real.md, real.png and results.json) into --output_dir. The same command resumes an interrupted
    experiment: finished cells are kept. Several processes may share one --output_dir.
    """

    MAIN_FLAGS: ClassVar = (
        *("output_dir", "train_data", "tests", "rows", "treatments"),
        *("levels", "grid", "seeds", "n", "model"),
    )

    output_dir: str = option("", "Directory of the experiment.")
    train_data: tuple[str, ...] = option(
        (LABORATORY,), "Training corpora; laboratory generates synthetic data.", kind="list"
    )
    tests: tuple[str, ...] = option(
        (),
        'Test sets for --train_data other than laboratory: NAME=FILE, candidates with "correct".',
        kind="list",
    )
    rows: tuple[str, ...] = option(
        PAPER_ROWS,
        "Rows of the table. orm is for --grid=table and real; the default has none in other grids.",
        choices=tuple(ROWS),
        kind="list",
    )
    treatments: tuple[str, ...] = option(
        ("plain", "plain_matched", "c2", "c3", "c4", "shuffled", "fine_to_coarse"),
        "Training treatments of each row.",
        choices=CHOICES,
        kind="list",
    )
    levels: tuple[str, ...] = option(
        ("some", "none", "much"),
        "Levels of redundancy of the laboratory's solutions. The first has all treatments.",
        choices=tuple(LEVELS),
        kind="list",
    )
    other_level_treatments: tuple[str, ...] = option(
        ("plain", "plain_matched", "c2"), "Treatments at the other levels.", choices=CHOICES, kind="list"
    )
    grouping_rows: tuple[str, ...] = option(
        ("bce", "q_ranking"),
        "Losses (as in --rows) for the comparison of whole records with shuffled trajectories; empty for none.",
        choices=tuple(LOSSES),
        kind="list",
    )
    grid: str = option(
        "table",
        "Grid of cells. table: --rows by --treatments, as the paper's table. frontier: --rows by the frontier flags, "
        "for accuracy against computed tokens. oracle: --rows by windows that merge the laboratory's "
        "redundant steps, or others. labels: --rows by kinds of labels from the same rollouts. search: search methods "
        "against Best-of-N at equal cost. real: --rows by --real_treatments, with frozen layers computed once.",
        choices=("table", "frontier", "oracle", "labels", "search", "real"),
    )
    frontier: FrontierConfig = dataclasses.field(default_factory=FrontierConfig)
    search: SearchGridConfig = dataclasses.field(default_factory=SearchGridConfig)
    real: RealConfig = dataclasses.field(default_factory=RealConfig)
    seeds: tuple[str, ...] = option(
        ("0", "1", "2", "3", "4"), "Random seeds of the data order, the reward head and the laboratory's data."
    )
    n: tuple[str, ...] = option(("8", "16", "32", "64"), "Values of n of Best-of-N.", kind="list")
    subsets: str = option(
        "all", "Candidates of Best-of-N: the mean over all subsets of n, or the first n, as bon.", choices=SUBSETS
    )
    margin: float = option(4.0, "Margin of Q-ranking.", lower=0.0, upper=1000.0)
    ranking_negatives: str = option(
        "path",
        "As --ranking_negatives of train, for rows of q_ranking whose labels count once.",
        choices=("path", "question"),
    )
    label_weight: str = option(
        "trajectory",
        "As --label_weight of train, for --grid=table; the treatments of the other grids have their own.",
        choices=("trajectory", "node"),
    )
    epochs_per_granularity: int = option(1, "Passes over the data at each granularity.", lower=1, upper=1000)
    window_tail: str = option(
        "keep", "Whether to keep a last window that is shorter than the others.", choices=("keep", "drop")
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    frozen: FrozenConfig = dataclasses.field(default_factory=FrozenConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    laboratory: LaboratoryConfig = dataclasses.field(default_factory=LaboratoryConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    data_cache_dir: str = option(
        "auto", "Directory of cached tokenised corpora; auto is in the user's cache directory."
    )
    given: frozenset[str] = frozenset()  # names of the flags that were set

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid in _GRIDS_OF_LOSSES and "rows" not in self.given and self.rows == PAPER_ROWS:
            object.__setattr__(self, "rows", tuple(row for row in PAPER_ROWS if row != ORM))


def refuse_unused(config: ExperimentConfig) -> None:
    """UserError for an option that is set and has no effect beside the others."""
    grid, in_laboratory = config.grid, config.train_data == (LABORATORY,)

    def refuse(used: bool, owner: Options, names: Iterable[str], purpose: str) -> None:
        if not used:
            options.refuse_unused(owner, names, purpose)

    for name, owner in (("frontier", config.frontier), ("search", config.search), ("real", config.real)):
        names = [field.name for field in dataclasses.fields(owner)]
        refuse(grid == name, owner, names, f"--grid={name}, not --grid={grid}")
    of_table = ("label_weight", "treatments", "other_level_treatments", "grouping_rows")
    refuse(grid == "table", config, of_table, f"--grid=table, not --grid={grid}")
    laboratory = [field.name for field in dataclasses.fields(config.laboratory)]
    purpose = f"--train_data={LABORATORY}, not data of one's own"
    refuse(in_laboratory, config.laboratory, laboratory, purpose)
    refuse(in_laboratory, config, ["levels", "other_level_treatments"], purpose)
    refuse(len(config.levels) > 1, config, ["other_level_treatments"], "several --levels, and there is one")
    refuse(grid == "labels", config.laboratory, ["rollouts"], f"--grid=labels, not --grid={grid}")
    losses = {*config.rows, *(config.grouping_rows if grid == "table" else ())}
    refuse("q_ranking" in losses, config, ["margin", "ranking_negatives"], "rows of q_ranking, and --rows has none")


def base_options(config: ExperimentConfig) -> TrainConfig:
    """Training options that all cells share.

    Raises:
      UserError: options that train refuses.
    """
    base = TrainConfig(
        train_data=config.train_data,
        model=config.model,
        lora=config.lora,
        frozen=config.frozen,
        granularity=GranularityConfig(
            epochs_per_granularity=config.epochs_per_granularity, window_tail=config.window_tail
        ),
        loss=LossConfig(
            margin=config.margin, label_weight=config.label_weight, ranking_negatives=config.ranking_negatives
        ),
        optimizer=config.optimizer,
        packing=config.packing,
        encoding=config.encoding,
        read=config.read,
        eval=EvalConfig(eval_fraction=0.0),
        device=config.device,
        run=RunConfig(data_cache_dir=config.data_cache_dir, checkpoint_every=10**6),
        given=config.given,
    )
    if config.train_data == (LABORATORY,):
        validate_training(base)  # the laboratory makes its own model
    else:
        validate_options(base)
    return base
