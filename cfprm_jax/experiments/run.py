"""Runs an experiment: its cells, then the report of its grid."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cfprm_jax.config import LARGEST_SEED, MOST_CANDIDATES
from cfprm_jax.data.formats.files import require
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import contrast_report, frontier_report, real_report, report, search_report
from cfprm_jax.experiments.grid import Cell, cells, check_names, frontier_cells, label_cells, oracle_cells, search_cells
from cfprm_jax.experiments.options import ExperimentConfig, base_options, refuse_unused
from cfprm_jax.experiments.real import real_cells
from cfprm_jax.experiments.real_runner import RealResult, RealRunner
from cfprm_jax.experiments.runner import LABORATORY, Materials, Runner
from cfprm_jax.experiments.search_runner import SearchResult, SearchRunner
from cfprm_jax.options import whole_number
from cfprm_jax.run import inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import config_files, output_paths
from cfprm_jax.runtime.progress import counted
from cfprm_jax.sharding import session

Log = Callable[[str], None]


class ExperimentSummary(NamedTuple):
    """What an experiment found: its tables, the number of cells, and the files of the report."""

    text: str
    cells: int
    files: tuple[str, ...]


def run(config: ExperimentConfig, log: Log) -> ExperimentSummary:
    """Runs the cells that have no result yet, and writes the report.

    Args:
      log: receives lines about devices, data and cells.

    Raises:
      UserError: incompatible options, or what a run of train raises.
    """
    refuse_unused(config)
    if config.grid == "real":
        return _run_real(config, log)
    grid, materials = plan(config)
    if materials.laboratory is None:
        require(train_data=config.train_data, tests=tuple(map(str, materials.tests.values())))
    directory = pathlib.Path(config.output_dir)
    options = config_files.as_dict(config)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    with session.opened(config.device, log) as opened:
        log(_grid_line(grid, config))
        if materials.laboratory is None:
            materials = dataclasses.replace(materials, base=_adopted(materials.base, directory, log))
        config_files.write_config(config, directory)
        if config.grid == "search":

            def searched(found: Sequence[SearchResult]) -> str:
                return search_report.write(directory, found, options)

            text = searched(SearchRunner(materials, config.search, opened.mesh, log).run(grid, after=searched))
            return ExperimentSummary(text, len(grid), search_report.FILES)
        runner = Runner(materials, opened.mesh, log)
        done = runner.run(grid)
        tests = {level: runner.tests(level) for level in dict.fromkeys(cell.level for cell in grid)}
    if config.grid == "frontier":
        text = frontier_report.write(directory, done, config.subsets, options)
        return ExperimentSummary(text, len(grid), frontier_report.FILES)
    if config.grid in contrast_report.COMPARISONS:
        what = contrast_report.COMPARISONS[config.grid]
        text = contrast_report.write(directory, what, done, config.subsets, options)
        return ExperimentSummary(text, len(grid), what.files)
    return ExperimentSummary(report.write(directory, done, tests, config.subsets, options), len(grid), report.FILES)


def _grid_line(grid: Sequence[object], config: ExperimentConfig) -> str:
    seeds = f"{counted(len(config.seeds), 'seed')}: {', '.join(config.seeds)}"
    return f"grid        {counted(len(grid), 'cell')}, {seeds}"


def _run_real(config: ExperimentConfig, log: Log) -> ExperimentSummary:
    """--grid=real; the report is written after each cell, of those that are done."""
    seeds, sizes = _numbers(config)
    if config.train_data == (LABORATORY,) or config.tests:
        raise UserError("--grid=real needs --train_data, a labelled corpus, and --pool in place of --tests")
    real, base = config.real, base_options(config)
    require(
        train_data=config.train_data,
        heldout_data=real.heldout_data,
        pool=real.pool,
        process_bench=real.process_bench,
    )
    grid = real_cells(config.rows, config.real.real_treatments, seeds)
    directory = pathlib.Path(config.output_dir)
    output_paths.require_directory(f"--output_dir={directory}", directory)
    with session.opened(config.device, log) as opened:
        log(_grid_line(grid, config))
        base = _adopted(base, directory, log)
        runner = RealRunner(directory, base, config.real, sizes, opened.mesh, log=log)
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
    return ExperimentSummary(text, len(grid), real_report.FILES)


def _adopted(base: TrainConfig, directory: pathlib.Path, log: Log) -> TrainConfig:
    """The options with the directory of --model, and head and encoding of the PRM that it may be, as of train."""
    sources = inputs.materialise(base, directory)
    adopted = inputs.adopt_prm_options(base, sources, log)
    return dataclasses.replace(adopted, model=dataclasses.replace(adopted.model, model=str(sources.model)))


def _numbers(config: ExperimentConfig) -> tuple[list[int], tuple[int, ...]]:
    """--seeds and --n.

    Raises:
      UserError: one of them, or --output_dir, is empty, or has what is no number or is there twice.
    """
    if not config.output_dir:
        raise UserError("--output_dir is empty: expected the directory of the experiment")
    for name, texts in (("--seeds", config.seeds), ("--n", config.n)):
        if not texts:
            raise UserError(f"{name} is empty: expected whole numbers, separated by commas")
    seeds = [whole_number(seed, "--seeds", 0, LARGEST_SEED) for seed in config.seeds]
    sizes = tuple(whole_number(text, "--n", 1, MOST_CANDIDATES) for text in config.n)
    check_names("--n", list(map(str, sizes)), None)
    return seeds, sizes


def plan(config: ExperimentConfig) -> tuple[list[Cell], Materials]:
    """The cells of the grid, and the data and options that they share.

    Raises:
      UserError: incompatible options.
    """
    seeds, sizes = _numbers(config)
    for name, value in (
        ("--frozen_layers", config.frozen.frozen_layers),
        ("--lora_rank", config.lora.lora_rank),
    ):
        if value:
            raise UserError(f"{name}={value} is for --grid=real")
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
    elif config.grid in (*contrast_report.COMPARISONS, "search"):
        if not in_laboratory:
            raise UserError(f"--grid={config.grid} requires --train_data=laboratory, where steps are exactly known")
        make = {"oracle": oracle_cells, "labels": label_cells, "search": search_cells}[config.grid]
        grid = make(config.rows, levels, seeds)
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
