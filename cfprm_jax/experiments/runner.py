"""Runs a grid of cells, each in its own directory.

The fingerprint of a cell is a hash of its options and of the content of its files. A cell whose directory contains the
same fingerprint is skipped, unless its run had fewer steps than it asked for; any other is run, and its result written
atomically as one file. Several processes may run one experiment: each takes cells that no other process has locked.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from cfprm_jax.data.corpus import Corpus
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.data.formats.files import expand
from cfprm_jax.data.loader import Loader
from cfprm_jax.errors import UserError
from cfprm_jax.experiments import laboratory, oracle, rolled
from cfprm_jax.experiments.cell import Bench, CellOutcome, TestSet, read_test, tokens_a_step
from cfprm_jax.experiments.cell_runs import StoredResult, read_result, run_cells, write_result
from cfprm_jax.experiments.grid import TREATMENTS, Cell
from cfprm_jax.experiments.treatment import ALL, COMPUTE, EXACT, MATCHED, MOST_PASSES, Treatment, lasting, num_steps
from cfprm_jax.run import inputs
from cfprm_jax.run.data import training_corpus, training_loader
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import atomic, config_files, digests, locks

LABORATORY = "laboratory"
# Raised when the same options would give other numbers, so that old cells are not taken for new ones.
_VERSION = 2
# The same for one way to count steps: it took trees before they are cut into rows, and batches of --batch_size alone.
_STEPS_VERSIONS = {COMPUTE: 2}
# Options that change no number, or that a cell's identity has in another form.
_NOT_IN_IDENTITY = (
    *("output_dir", "compile_cache_dir", "data_cache_dir", "logger"),
    *("train_data", "model", "seed", "loss"),
)


@dataclasses.dataclass(frozen=True)
class Materials:
    """What cells are made of.

    Attributes:
      directory: of the experiment.
      base: training options that all cells share.
      tests: files of the test sets, for real data.
      sizes: the n of Best-of-N.
      laboratory: options of the synthetic world; None for real data.
    """

    directory: pathlib.Path
    base: TrainConfig
    tests: dict[str, pathlib.Path]
    sizes: tuple[int, ...]
    laboratory: laboratory.LaboratoryConfig | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CellResult:
    """What is kept of a cell; right is as in CellOutcome."""

    cell: Cell
    summary: dict[str, Any]
    right: dict[str, Float[np.ndarray, "questions n"]]


class Runner:
    """Makes data and runs cells."""

    def __init__(self, materials: Materials, mesh: Mesh, log: Callable[[str], None]) -> None:
        self._materials, self._mesh, self._log = materials, mesh, log
        self._bench = Bench(mesh)
        self._levels: dict[str, laboratory.Level] = {}
        self._tests: dict[str, list[TestSet]] = {}
        self._digests: dict[pathlib.Path, str] = {}

    def run(self, grid: Sequence[Cell]) -> list[CellResult]:
        """The results of all cells, in the order of the grid, those that are there already among them."""
        self.prepare(grid)
        return run_cells(grid, self.cell_directory, self._load, self._run, line=_line, log=self._log)

    def prepare(self, grid: Sequence[Cell]) -> None:
        """Make the laboratory's data of all cells.

        Raises:
          UserError: a treatment that has more passes than a run may have, or as of making the laboratory.
        """
        passes = self._materials.base.granularity.epochs_per_granularity
        for cell in grid:
            most = MOST_PASSES // cell.what.passes
            if passes > most:
                raise UserError(
                    f"--epochs_per_granularity={passes}: expected at most {most} with {cell.treatment!r}, which has "
                    f"{cell.what.passes} times as many passes"
                )
        for level in dict.fromkeys(cell.level for cell in grid):
            self._prepare(level, sorted({cell.seed for cell in grid if cell.level == level}))

    def tests(self, level: str) -> list[TestSet]:
        """The test sets of a level."""
        if level not in self._tests:
            base, most = self._materials.base, max(self._materials.sizes)
            encoder = Encoder(load_tokenizer(self._model(level), base.encoding.marker), base.encoding)
            files = self._levels[level].tests if self._materials.laboratory else self._materials.tests
            self._tests[level] = [read_test(name, path, encoder, most) for name, path in files.items()]
            for test in self._tests[level]:
                if warning := test.split.warning(encoder.config.separator):
                    self._log(f"{test.name}: {warning}")
        return self._tests[level]

    def train_config(self, cell: Cell) -> TrainConfig:
        """The options of the train command that give this cell's run, but for --output_dir."""
        config, what = self._passes(cell), cell.what
        if what.train_tokens:
            return _frontier_config(config, what, self._corpus(config), self._mesh)
        if what.steps == ALL:
            return config
        steps = max(self._steps(cell, config), 1)
        asked = f"--epochs_per_granularity={self._materials.base.granularity.epochs_per_granularity} for {cell.name}"
        found = lasting(config, steps, self._corpus(config), asked=asked)
        if found.run.max_steps < steps:
            self._log(f"steps       {cell.name}: {found.run.max_steps}, all that its granularities have, not {steps}")
        return found

    def _passes(self, cell: Cell) -> TrainConfig:
        """The options of a cell's passes over its data, whatever steps it is to have."""
        base, what = self._materials.base, cell.what
        config = dataclasses.replace(
            base,
            train_data=self._train(cell),
            model=dataclasses.replace(base.model, model=str(self._model(cell.level))),
            granularity=cell.granularity(base.granularity),
            loss=dataclasses.replace(
                base.loss, loss=cell.loss, label_weight=what.label_weight or base.loss.label_weight
            ),
            packing=dataclasses.replace(base.packing, packing=what.packing, record_chunk=what.record_chunk)
            if what.packing
            else base.packing,
            run=dataclasses.replace(base.run, seed=cell.seed),
        )
        if what.estimate:
            estimates = dataclasses.replace(base.read.estimates, estimate=what.estimate)
            config = dataclasses.replace(config, read=dataclasses.replace(base.read, estimates=estimates))
        return config

    def _steps(self, cell: Cell, config: TrainConfig) -> int:
        """The steps that a cell is to have, of these passes."""
        base, what = self._materials.base, cell.what
        if what.steps == MATCHED:
            granularity = dataclasses.replace(base.granularity, c_max=1, granularities=TREATMENTS["c2"].granularities)
            paired = dataclasses.replace(config, granularity=granularity)
            corpus = self._corpus(paired)
            if config.packing.batch_tokens:
                return num_steps(paired, corpus)
            trajectories = sum(map(corpus.num_trajectories, granularity.stages)) * granularity.epochs_per_granularity
            return trajectories // config.packing.batch_size
        if what.steps == EXACT:
            data = (str(self._levels[cell.level].train[cell.seed]),)
            exact = dataclasses.replace(config, train_data=data, read=base.read)
            return num_steps(exact, self._corpus(exact))
        packing = dataclasses.replace(config.packing, packing="tree", record_chunk=what.record_chunk)
        own, together = self._loader(config), self._loader(dataclasses.replace(config, packing=packing))
        return round(own.num_steps * _tokens(together) / _tokens(own))

    def _corpus(self, config: TrainConfig) -> Corpus:
        """The training corpus of a run."""
        tokenizer = load_tokenizer(config.model.model, config.encoding.marker)
        return training_corpus(config, inputs.materialise(config, self._materials.directory), tokenizer)

    def _loader(self, config: TrainConfig) -> Loader:
        """The batches of a run."""
        return training_loader(config, self._corpus(config), self._mesh)

    def _prepare(self, level: str, seeds: Sequence[int]) -> None:
        made = self._materials.laboratory
        if made is not None:
            root = self._materials.directory / LABORATORY
            self._levels[level] = laboratory.make(
                root, level, seeds, config=made, encoding=self._materials.base.encoding, mesh=self._mesh, log=self._log
            )

    def policy(self, level: str) -> pathlib.Path:
        """The laboratory's policy at a level."""
        return self._levels[level].model.with_name("policy")

    def _model(self, level: str) -> pathlib.Path:
        return self._levels[level].model if self._levels else pathlib.Path(self._materials.base.model.model)

    def _train(self, cell: Cell) -> tuple[str, ...]:
        if not self._levels:
            return self._materials.base.train_data
        path = self._levels[cell.level].train[cell.seed]
        kind = cell.what.training_rows
        if not kind:
            return (str(path),)
        with locks.held(path.with_suffix(".lock"), wait=True):
            return (str(self._derived(path, kind, cell)),)

    def _derived(self, path: pathlib.Path, kind: str, cell: Cell) -> pathlib.Path:
        """A training set with further fields, made where it is missing."""
        made = self._materials.laboratory
        assert made is not None
        suffix = rolled.suffix(made.rollouts, made.sampling_temperature) if kind in rolled.FILES else ""
        own = path.with_name(f"{path.stem}.{kind}{suffix}.jsonl")
        if own.exists():
            return own
        if kind in oracle.KINDS:
            oracle.write(path, own, kind, cell.seed)
        elif kind == rolled.CONSENSUS:
            rolled.keep_consensus(self._derived(path, rolled.ROLLED, cell), own, cell.seed)
        else:
            encoding = self._materials.base.encoding
            policy = self.policy(cell.level)
            complete = rolled.sampled(
                policy, encoding, self._mesh, temperature=made.sampling_temperature, seed=cell.seed
            )
            rolled.write(path, own, complete, made.rollouts, encoding.separator)
            self._log(f"rollouts    redundancy {cell.level}, seed {cell.seed}: {rolled.describe(own)}")
        return own

    def cell_directory(self, cell: Cell) -> pathlib.Path:
        """Of its result."""
        return self._materials.directory / "cells" / cell.name

    def fingerprint(self, cell: Cell) -> str:
        """A hash of its options and of the content of its files."""
        options = config_files.as_dict(self._materials.base)
        what = cell.what.identity()
        if cell.what.train_tokens:
            options["epochs_per_granularity"] = 1  # --train_tokens is as many passes as it takes
        for name in ("training_rows", "estimate"):
            if not what[name]:
                del what[name]  # so that results from before this field stay valid
        identity = {
            "version": _VERSION,
            "options": {name: value for name, value in options.items() if name not in _NOT_IN_IDENTITY},
            "cell": [cell.loss, what, cell.seed],
            "train": [self._digest(file.path) for file in expand(self._train(cell))],
            "model": {p.name: self._digest(p) for p in sorted(self._model(cell.level).iterdir()) if p.is_file()},
            "tests": [[test.name, self._digest(test.path)] for test in self.tests(cell.level)],
            "n": self._materials.sizes,
        }
        if cell.what.steps in _STEPS_VERSIONS:
            identity["steps"] = _STEPS_VERSIONS[cell.what.steps]
        return digests.of_json(identity)

    def _digest(self, path: pathlib.Path) -> str:
        if path not in self._digests:
            self._digests[path] = digests.of_file(path)
        return self._digests[path]

    def _load(self, cell: Cell) -> CellResult | None:
        stored = read_result(self.cell_directory(cell) / "result.npz", lambda: self.fingerprint(cell))
        return None if stored is None else CellResult(cell, *stored)

    def _run(self, cell: Cell) -> tuple[CellResult, float]:
        started = time.monotonic()
        config, directory = self.train_config(cell), self.cell_directory(cell)
        outcome = self._bench.run(config, self.tests(cell.level), self._materials.sizes)
        summary = _summary(outcome, self.fingerprint(cell), self._materials.sizes)
        seconds = time.monotonic() - started
        atomic.write_text(directory / "seconds.txt", f"{seconds:.2f}\n")
        write_result(directory / "result.npz", StoredResult(summary, outcome.right), config)
        return CellResult(cell, summary, outcome.right), seconds


def _line(result: CellResult) -> str:
    return f"{result.summary['steps']} steps; {_accuracies(result)}"


def _frontier_config(config: TrainConfig, what: Treatment, corpus: Corpus, mesh: Mesh) -> TrainConfig:
    """The options of a run whose tokens are given: a step's, and all of it, in as many passes as that takes."""
    config = dataclasses.replace(
        config,
        granularity=dataclasses.replace(config.granularity, epochs_per_granularity=1),
        loss=dataclasses.replace(config.loss, negative_weight=what.negative_weight or _balancing(corpus)),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=what.learning_rate),
        packing=dataclasses.replace(config.packing, batch_tokens=what.batch_tokens),
    )
    tokens = tokens_a_step(training_loader(config, corpus, mesh))
    # Two digits, so that seeds share compiled steps: the schedule of another number of steps is another program.
    steps = max(int(float(f"{what.train_tokens / tokens:.1e}")), 1)
    return lasting(config, steps, corpus, asked=f"--train_tokens={what.train_tokens}", tokens=tokens)


def _balancing(corpus: Corpus) -> float:
    """The weight that gives negative labels of the expanded corpus the share that they have of the distinct steps."""
    counts = corpus.report["granularities"]["1"]

    def odds(negative: int, of: int) -> float:
        return negative / max(of - negative, 1)

    once = odds(counts["distinct_negative_steps"], counts["distinct_labelled_steps"])
    return once / max(odds(counts["negative_steps"], counts["labelled_steps"]), 1e-9)


def _tokens(loader: Loader) -> int:
    """The tokens that a run computes. Every batch counts: those of whole records differ by more than a sample shows."""
    return sum(loader.batch(step).tokens_computed for step in range(loader.num_steps))


def _summary(outcome: CellOutcome, fingerprint: str, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "steps": outcome.num_steps,
        "tokens": outcome.tokens,
        "final_loss": outcome.final_loss,
        "auroc": outcome.auroc,
        "parameters_sha256": outcome.digest,
        "n": list(sizes),
        "accuracy": {name: right.mean(axis=0).tolist() for name, right in outcome.right.items()},
    }


def _accuracies(result: CellResult) -> str:
    """Mean accuracy over n of every test set, by the cell's aggregation."""
    parts = []
    for name, values in result.summary["accuracy"].items():
        test, aggregation, subsets = name.rsplit("/", 2)
        if aggregation == result.cell.aggregation and subsets == "all":
            parts.append(f"{test} {100 * float(np.mean(values)):.1f} %")
    return ", ".join(parts)
