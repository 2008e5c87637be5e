"""python -m cfprm_jax.experiment: the paper's grid of training runs, with tables, a figure and findings."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import ClassVar

from cfprm_jax import flags
from cfprm_jax.config import (
    LARGEST_SEED,
    MOST_CANDIDATES,
    DeviceConfig,
    EncodingConfig,
    EvalConfig,
    FrozenConfig,
    GranularityConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ReadConfig,
    RunConfig,
)
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import contrast_report, frontier_report, real_report, report
from cfprm_jax.experiments.cell import SUBSETS
from cfprm_jax.experiments.frontier import FrontierConfig
from cfprm_jax.experiments.grid import (
    CHOICES,
    LOSSES,
    PAPER_ROWS,
    ROWS,
    Cell,
    cells,
    frontier_cells,
    label_cells,
    oracle_cells,
)
from cfprm_jax.experiments.laboratory import LEVELS, LaboratoryConfig
from cfprm_jax.experiments.real import RealConfig, real_cells
from cfprm_jax.experiments.real_runner import RealResult, RealRunner
from cfprm_jax.experiments.runner import LABORATORY, Materials, Runner
from cfprm_jax.options import Options, option, whole_number
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import config_files, output_paths
from cfprm_jax.runtime.progress import duration
from cfprm_jax.sharding import session


@dataclasses.dataclass(frozen=True)
class ExperimentConfig(Options):
    """Run the paper's experiments: a grid of losses, treatments and seeds, each trained, scored and evaluated.

    python -m cfprm_jax.experiment --flagfile=configs/lab/paper.flags

    Writes a directory per cell, and table2.md, table2.tex, controls.md, figure.png, findings.md and results.json (with
    --grid=frontier: frontier.md, frontier.png and frontier.json; with oracle or labels: a .md and a .json of that name;
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
    rows: tuple[str, ...] = option(PAPER_ROWS, "Rows of the table.", choices=tuple(ROWS), kind="list")
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
        "Rows that compare --packing=tree, which keeps records together, with --packing.",
        choices=tuple(LOSSES),
        kind="list",
    )
    grid: str = option(
        "table",
        "Grid of cells. table: --rows by --treatments, as the paper's table. frontier: --rows by the frontier flags, "
        "for accuracy against computed tokens. oracle: --rows by windows that merge the laboratory's "
        "redundant steps, or others. labels: --rows by kinds of labels from the same rollouts. real: --rows by "
        "--real_treatments, with frozen layers computed once.",
        choices=("table", "frontier", "oracle", "labels", "real"),
    )
    frontier: FrontierConfig = dataclasses.field(default_factory=FrontierConfig)
    real: RealConfig = dataclasses.field(default_factory=RealConfig)
    seeds: tuple[str, ...] = option(
        ("0", "1", "2", "3", "4"), "Random seeds of the data order, the reward head and the laboratory's data."
    )
    n: tuple[str, ...] = option(("8", "16", "32", "64"), "Values of n of Best-of-N.", kind="list")
    subsets: str = option(
        "all", "Candidates of Best-of-N: the mean over all subsets of n, or the first n, as bon.", choices=SUBSETS
    )
    margin: float = option(4.0, "Margin of Q-ranking.", lower=0.0, upper=1000.0)
    epochs_per_granularity: int = option(1, "Epochs over the data at each granularity.", lower=1, upper=1000)
    window_tail: str = option(
        "keep", "Whether to keep a last window that is shorter than the others.", choices=("keep", "drop")
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
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


def main(config: ExperimentConfig) -> int:
    """Runs the command."""
    started = time.monotonic()
    if config.grid == "real":
        return _main_real(config)
    grid, materials = plan(config)
    log = functools.partial(print, flush=True)
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    with session.opened(config.device, log) as opened:
        log(f"grid        {len(grid)} cells, {len(config.seeds)} seeds: {', '.join(config.seeds)}")
        config_files.write_config(config, directory)
        runner = Runner(materials, opened.mesh, log)
        done = runner.run(grid)
        tests = {level: runner.tests(level) for level in dict.fromkeys(cell.level for cell in grid)}
    files: tuple[str, ...] = report.FILES
    if config.grid == "frontier":
        files = frontier_report.FILES
        text = frontier_report.write(directory, done, config.subsets, config_files.as_dict(config))
    elif config.grid in contrast_report.COMPARISONS:
        what = contrast_report.COMPARISONS[config.grid]
        files = what.files
        text = contrast_report.write(directory, what, done, config.subsets, config_files.as_dict(config))
    else:
        text = report.write(directory, done, tests, config.subsets, config_files.as_dict(config))
    log(f"\n{text}")
    log(f"done        {len(grid)} cells in {duration(time.monotonic() - started)}")
    log(f"results     {directory}: {', '.join(files)}")
    return 0


def _main_real(config: ExperimentConfig) -> int:
    """Runs --grid=real; the report is written after each cell, of those that are done."""
    started = time.monotonic()
    seeds, sizes = _numbers(config)
    if config.train_data == (LABORATORY,) or config.tests:
        raise UserError("--grid=real needs --train_data, a labelled corpus, and --pool in place of --tests")
    grid = real_cells(config.rows, config.real.real_treatments, seeds)
    log = functools.partial(print, flush=True)
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    with session.opened(config.device, log) as opened:
        log(f"grid        {len(grid)} cells, {len(seeds)} seeds: {', '.join(config.seeds)}")
        runner = RealRunner(directory, base_options(config), config.real, sizes, opened.mesh, log=log)
        config_files.write_config(config, directory)

        def report_on(done: Sequence[RealResult]) -> str:
            return real_report.write(
                directory,
                done,
                runner.sets,
                cells=len(grid),
                sizes=sizes,
                subsets=config.subsets,
                resamples=config.real.resamples,
                config=config_files.as_dict(config),
            )

        text = report_on(runner.run(grid, after=report_on))
    log(f"\n{text}")
    log(f"done        {len(grid)} cells in {duration(time.monotonic() - started)}")
    log(f"results     {directory}: {', '.join(real_report.FILES)}")
    return 0


def _numbers(config: ExperimentConfig) -> tuple[list[int], tuple[int, ...]]:
    """--seeds and --n."""
    if not config.output_dir:
        raise UserError("--output_dir is empty: expected the directory of the experiment")
    seeds = [whole_number(seed, "--seeds", 0, LARGEST_SEED) for seed in config.seeds]
    return seeds, tuple(whole_number(text, "--n", 1, MOST_CANDIDATES) for text in config.n)


def plan(config: ExperimentConfig) -> tuple[list[Cell], Materials]:
    """The cells of the grid, and the data and options that they share.

    Raises:
      UserError: incompatible options.
    """
    seeds, sizes = _numbers(config)
    if config.frozen.frozen_layers:
        raise UserError(f"--frozen_layers={config.frozen.frozen_layers} is for --grid=real")
    in_laboratory = config.train_data == (LABORATORY,)
    if in_laboratory and config.tests:
        raise UserError("--tests: --train_data=laboratory generates its own test sets; set --train_data for others")
    if not in_laboratory and not config.tests:
        raise UserError("--tests is empty: expected candidates files, NAME=FILE")
    tests = {}
    for entry in config.tests:
        name, found, path = entry.partition("=")
        if not (name and found and path) or name in tests:
            raise UserError(f"--tests: {entry!r} is not NAME=FILE with a unique name")
        tests[name] = pathlib.Path(path)
    levels = config.levels if in_laboratory else ("real",)
    if config.grid == "frontier":
        grid = frontier_cells(config.rows, levels, seeds, config.frontier)
    elif config.grid in contrast_report.COMPARISONS:
        if not in_laboratory:
            raise UserError(f"--grid={config.grid} requires --train_data=laboratory, where steps are exactly known")
        grid = (oracle_cells if config.grid == "oracle" else label_cells)(config.rows, levels, seeds)
    else:
        grid = cells(
            config.rows,
            config.treatments,
            levels,
            seeds,
            elsewhere=config.other_level_treatments,
            packings=config.grouping_rows,
        )
    return grid, Materials(
        pathlib.Path(config.output_dir),
        base_options(config),
        tests,
        sizes,
        config.laboratory if in_laboratory else None,
    )


def base_options(config: ExperimentConfig) -> TrainConfig:
    """Training options that all cells share."""
    return TrainConfig(
        train_data=config.train_data,
        model=config.model,
        frozen=config.frozen,
        granularity=GranularityConfig(
            epochs_per_granularity=config.epochs_per_granularity, window_tail=config.window_tail
        ),
        loss=LossConfig(margin=config.margin),
        optimizer=config.optimizer,
        packing=config.packing,
        encoding=config.encoding,
        read=config.read,
        eval=EvalConfig(eval_fraction=0.0),
        device=config.device,
        run=RunConfig(data_cache_dir=config.data_cache_dir, checkpoint_every=10**6),
    )


if __name__ == "__main__":
    sys.exit(flags.run(ExperimentConfig, main))
