"""Runs the cells of --grid=real: chooses records, computes what the trunk cache lacks, trains and evaluates.

As in :mod:`.runner`, a cell whose directory has a result with the same fingerprint is skipped.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from cfprm_jax.config import ReadConfig
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.loader import Loader
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.cell import tokens_a_step
from cfprm_jax.experiments.cell_runs import StoredResult, read_result, run_cells, write_result
from cfprm_jax.experiments.grid import Cell
from cfprm_jax.experiments.real import RealConfig, what
from cfprm_jax.experiments.real_cell import RealBench, RealOutcome
from cfprm_jax.experiments.real_data import TRAIN, choose, drawn, read_sets, write_records
from cfprm_jax.experiments.treatment import COMPUTE, MATCHED
from cfprm_jax.run import inputs
from cfprm_jax.run.data import training_corpus, training_loader
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.trunk import open_hidden
from cfprm_jax.runtime import atomic, config_files, digests

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
                config = self._passes(cell, 1)
                one = dataclasses.replace(config.granularity, granularities=(granularity,))
                sources = inputs.materialise(config, self._directory)
                corpus = training_corpus(dataclasses.replace(config, granularity=one), sources, self._tokenizer)
                for found in corpus.granularities:
                    hidden.prepare(corpus[found])
        if hidden is not None:
            hidden.free()

    def train_config(self, cell: Cell) -> TrainConfig:
        """The options of the train command that give this cell's run, but for --output_dir."""
        config = self._passes(cell, what(cell).passes)
        if what(cell).steps == COMPUTE:
            other = dataclasses.replace(cell, treatment="each_once")
            tokens = self._tokens(self.loader(self._passes(other, what(other).passes)))
            own = self.loader(config)
            steps = max(round(tokens * own.num_steps / self._tokens(own)), 1)
            return self._limited(cell, own.num_steps, steps)
        if what(cell).steps == MATCHED:
            other = dataclasses.replace(cell, treatment="c2")
            steps = self.loader(self._passes(other, what(other).passes)).num_steps
            return self._limited(cell, self.loader(config).num_steps, steps)
        return config

    def _limited(self, cell: Cell, once: int, steps: int) -> TrainConfig:
        """The run of this number of steps, in as many passes as that takes."""
        config = self._passes(cell, -(-steps // once))
        return dataclasses.replace(config, run=dataclasses.replace(config.run, max_steps=steps))

    def _passes(self, cell: Cell, passes: int) -> TrainConfig:
        """The run of some passes over the records of its seed."""
        base, treatment = self._base, what(cell)
        path = self._train_path(cell.seed)
        granularity = dataclasses.replace(
            base.granularity,
            c_max=1,
            granularities=treatment.granularities,
            epochs_per_granularity=passes * base.granularity.epochs_per_granularity,
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
        sources = inputs.materialise(config, self._directory)
        return training_loader(config, training_corpus(config, sources, self._tokenizer), self._mesh)

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
        own = [cell.loss, dataclasses.asdict(what(cell)), cell.seed]
        train = digests.of_file(self._train_path(cell.seed))
        return digests.of_json({**self._identity, "cell": own, "train": train})

    def _load(self, cell: Cell) -> RealResult | None:
        stored = read_result(self._cell_directory(cell) / "result.npz", lambda: self._fingerprint(cell))
        return None if stored is None else RealResult(cell, *stored)

    def _run(self, cell: Cell) -> tuple[RealResult, float]:
        config, directory = self.train_config(cell), self._cell_directory(cell)
        outcome = self._bench.run(config, self._sizes)
        result = RealResult(cell, _summary(outcome, self._fingerprint(cell)), outcome.arrays)
        atomic.write_text(directory / "train.flags", config_files.flag_file(config))
        write_result(directory / "result.npz", StoredResult(result.summary, outcome.arrays))
        return result, outcome.train_seconds + outcome.evaluation_seconds


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
