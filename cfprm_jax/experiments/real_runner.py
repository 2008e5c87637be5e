"""Runs the cells of --grid=real: chooses records, computes what the trunk cache lacks, trains and evaluates.

As in :mod:`.runner`, a cell whose directory has a result with the same fingerprint is skipped.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from cfprm_jax.benchmarks.process_bench import read as read_process_bench
from cfprm_jax.config import ReadConfig
from cfprm_jax.data.corpus import Corpus
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.data.formats.files import expand, rows
from cfprm_jax.data.loader import Loader
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.cell import tokens_a_step
from cfprm_jax.experiments.cell_runs import StoredResult, read_result, run_cells, write_result
from cfprm_jax.experiments.grid import Cell
from cfprm_jax.experiments.real import RealConfig, what
from cfprm_jax.experiments.real_cell import RealBench, RealOutcome
from cfprm_jax.experiments.real_data import TRAIN, choose, drawn, read_sets, write_records
from cfprm_jax.experiments.treatment import COMPUTE, MATCHED, lasting, num_steps
from cfprm_jax.run import inputs
from cfprm_jax.run.data import training_corpus, training_loader
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.trunk import open_hidden
from cfprm_jax.runtime import config_files, digests

# Raised when the same options would give other numbers.
_VERSION = 1
# Options that change no number, or that a cell's identity has in another form.
_NOT_IN_IDENTITY = (
    *("output_dir", "compile_cache_dir", "data_cache_dir", "cache_frozen", "logger"),
    *("train_data", "model", "seed", "loss"),
)


class RealResult(NamedTuple):
    """What is kept of a cell: its summary, and arrays as of RealOutcome."""

    cell: Cell
    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


class RealRunner:
    """Prepares data and runs cells.

    Attributes:
      sets: what cells are evaluated on.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        base: TrainConfig,
        config: RealConfig,
        sizes: Sequence[int],
        mesh: Mesh,
        *,
        log: Callable[[str], None],
    ) -> None:
        """A runner in the directory of an experiment.

        Args:
          base: training options that all cells share.
          sizes: the n of Best-of-N.

        Raises:
          UserError: options or files that do not fit.
        """
        if base.frozen.frozen_layers and not base.frozen.cached:
            raise UserError("--grid=real with --frozen_layers needs --cache_frozen: cells share what is frozen")
        if not base.packing.batch_tokens:
            raise UserError("--grid=real needs --batch_tokens, so that treatments have steps of as many tokens")
        self._directory, self._base, self._config, self._sizes = directory, base, config, tuple(sizes)
        self._mesh, self._log = mesh, log
        self._sources = inputs.materialise(base, directory)
        self._network = network = inputs.open_network(base, self._sources, mesh)
        self._tokenizer = load_tokenizer(self._sources.model, base.encoding.marker, network.config.backbone.vocab_size)
        encoder = Encoder(self._tokenizer, base.encoding)
        chosen = choose(base.train_data, base.read, encoder, config.train_records, config.record_tokens, flags=TRAIN)
        log(f"train       {chosen.describe()}")
        self._records = chosen.records
        self.sets = read_sets(config, base.read, encoder, max(sizes), log)
        self._bench = RealBench(base, network, self._sources, self._tokenizer, self.sets, mesh=mesh, log=log)
        self._identity: dict[str, Any] | None = None
        self._written: set[pathlib.Path] = set()

    def run(
        self, grid: Sequence[Cell], after: Callable[[Sequence[RealResult]], object] = lambda _: None
    ) -> list[RealResult]:
        """The results of all cells, in the order of the grid, those that are there already among them.

        Args:
          after: called after each cell that was run, with all results so far.
        """
        missing = [cell for cell in grid if self._load(cell) is None]
        self._prepare_training(missing)
        if missing:
            self._bench.prepare()
        return run_cells(grid, self._cell_directory, self._load, self._run, line=_line, log=self._log, after=after)

    def _prepare_training(self, cells: Sequence[Cell]) -> None:
        """Compute what the cache lacks of the records that these cells train on, once for all of them."""
        if not self._network.partition.cached:
            return
        hidden = open_hidden(
            self._base,
            self._sources,
            self._network.partition,
            tokenizer=self._tokenizer,
            mesh=self._mesh,
            log=self._log,
        )
        done: set[tuple[pathlib.Path, str]] = set()
        for cell in cells:
            for granularity in what(cell).granularities:
                key = (self._train_path(cell.seed), granularity)
                if hidden is None or key in done:
                    continue
                done.add(key)
                config = self._passes(cell)
                one = dataclasses.replace(config.granularity, granularities=(granularity,))
                corpus = self._corpus(dataclasses.replace(config, granularity=one))
                for found in corpus.granularities:
                    hidden.prepare(corpus[found])
        if hidden is not None:
            hidden.free()

    def train_config(self, cell: Cell) -> TrainConfig:
        """The options of the train command that give this cell's run, but for --output_dir."""
        config = self._passes(cell)
        if what(cell).steps == COMPUTE:
            tokens = self._tokens(self.loader(self._passes(dataclasses.replace(cell, treatment="each_once"))))
            own = self.loader(config)
            steps = max(round(tokens * own.num_steps / self._tokens(own)), 1)
        elif what(cell).steps == MATCHED:
            paired = self._passes(dataclasses.replace(cell, treatment="c2"))
            steps = num_steps(paired, self._corpus(paired))
        else:
            return config
        asked = f"--epochs_per_granularity={self._base.granularity.epochs_per_granularity} for {cell.name}"
        return lasting(config, steps, self._corpus(config), asked=asked)

    def _passes(self, cell: Cell) -> TrainConfig:
        """The options of a cell's passes over the records of its seed, whatever steps it is to have."""
        base, treatment = self._base, what(cell)
        path = self._train_path(cell.seed)
        granularity = dataclasses.replace(
            base.granularity,
            c_max=1,
            granularities=treatment.granularities,
            epochs_per_granularity=treatment.passes * base.granularity.epochs_per_granularity,
            schedule=treatment.schedule,
        )
        return dataclasses.replace(
            base,
            train_data=(str(path),),
            read=ReadConfig(data_format="stepwise"),
            granularity=granularity,
            loss=dataclasses.replace(base.loss, loss=cell.loss, label_weight=treatment.label_weight),
            packing=dataclasses.replace(base.packing, packing=treatment.packing, record_chunk=treatment.record_chunk),
            run=dataclasses.replace(base.run, seed=cell.seed),
        )

    def loader(self, config: TrainConfig) -> Loader:
        """Its batches, without hidden states."""
        return training_loader(config, self._corpus(config), self._mesh)

    def _corpus(self, config: TrainConfig) -> Corpus:
        """The training corpus of a run."""
        return training_corpus(config, inputs.materialise(config, self._directory), self._tokenizer)

    def _tokens(self, loader: Loader) -> float:
        """The tokens that a run computes, from a sample of its batches."""
        return loader.num_steps * tokens_a_step(loader)

    def _train_path(self, seed: int) -> pathlib.Path:
        """The records of a seed, written when they are first needed."""
        most = self._config.train_tokens_per_seed
        path = self._directory / "data" / (f"train_{seed}.jsonl" if most else "train.jsonl")
        if path not in self._written:
            write_records(path, drawn(self._records, most, seed))
            self._written.add(path)
        return path

    def _cell_directory(self, cell: Cell) -> pathlib.Path:
        return self._directory / "cells" / cell.name

    def _fingerprint(self, cell: Cell) -> str:
        if self._identity is None:
            options = config_files.as_dict(self._base)
            evaluation = [*self._config.heldout_data, self._config.pool, *self._config.process_bench]
            self._identity = {
                "version": _VERSION,
                "options": {name: value for name, value in options.items() if name not in _NOT_IN_IDENTITY},
                "model": {p.name: digests.of_file(p) for p in sorted(self._sources.model.iterdir()) if p.is_file()},
                "sets": [digests.of_file(file.path) for name in evaluation if name for file in expand(name)],
                "records": [self._config.heldout_records, self._config.heldout_record_tokens],
                "questions": [self._config.pool_questions, self._config.process_bench_solutions],
                "n": self._sizes,
            }
            if named := _named_after_files(self._config.process_bench):
                self._identity["subsets"] = named
        own = [cell.loss, what(cell).identity(), cell.seed]
        train = digests.of_file(self._train_path(cell.seed))
        return digests.of_json({**self._identity, "cell": own, "train": train})

    def _load(self, cell: Cell) -> RealResult | None:
        stored = read_result(self._cell_directory(cell) / "result.npz", lambda: self._fingerprint(cell))
        return None if stored is None else RealResult(cell, *stored)

    def _run(self, cell: Cell) -> tuple[RealResult, float]:
        config, directory = self.train_config(cell), self._cell_directory(cell)
        outcome = self._bench.run(config, self._sizes)
        result = RealResult(cell, _summary(outcome, self._fingerprint(cell)), outcome.arrays)
        write_result(directory / "result.npz", StoredResult(result.summary, outcome.arrays), config)
        return result, outcome.train_seconds + outcome.evaluation_seconds


def _named_after_files(paths: Sequence[str]) -> list[str]:
    """The subsets of ProcessBench whose name is that of a file, which its content says nothing about."""
    if not paths:
        return []
    given = (row.data or {} for file in expand(paths) for row in rows(file))
    found: dict[str, None] = {}
    for data, row in zip(given, read_process_bench(paths), strict=True):
        name = row["subset"]
        if not data.get("subset") and not re.fullmatch(rf"{re.escape(name)}-\d+", str(data.get("id", ""))):
            found[name] = None
    return list(found)


def _summary(outcome: RealOutcome, fingerprint: str) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "final_loss": outcome.final_loss,
        "parameters_sha256": outcome.digest,
        "train_seconds": round(outcome.train_seconds, 2),
        "evaluation_seconds": round(outcome.evaluation_seconds, 2),
    }


def _line(result: RealResult) -> str:
    found = result.summary
    return (
        f"{found['steps']} steps, {found['tokens']:,} tokens, loss {found['final_loss']:.4f}, "
        f"{found['train_seconds']:,.0f} s to train and {found['evaluation_seconds']:,.0f} s to evaluate"
    )
