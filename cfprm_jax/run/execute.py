"""A whole run of train in one process: lock, devices, setup, loop, Best-of-N.

The main process prints and writes; the others compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import pathlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from cfprm_jax.checkpoints import model_files, retention, saving
from cfprm_jax.config import DistributedConfig
from cfprm_jax.data.candidates import Question
from cfprm_jax.data.loader import Batch
from cfprm_jax.run import best_of_n, directory, evaluation, identity, inputs, loop
from cfprm_jax.run.inputs import LogLine, Network, Sources
from cfprm_jax.run.loggers import LoggedRun, Loggers
from cfprm_jax.run.loop import LoopResult, Position, TrainingPlan, Writers
from cfprm_jax.run.metrics import MetricLog, MetricWriter, NullWriter, Progress
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup, setup
from cfprm_jax.run.stopping import exit_status, resume_with
from cfprm_jax.runtime import config_files, devices, disk, out_of_memory
from cfprm_jax.runtime.distributed import Processes, StopVote
from cfprm_jax.runtime.progress import counted, duration
from cfprm_jax.runtime.signals import StopSignal
from cfprm_jax.sharding import session
from cfprm_jax.training import flops


def execute(config: TrainConfig, processes: Processes, stop_signal: StopSignal) -> int:
    """This process's part of a run; the exit status of the command.

    Raises:
      UserError: options, files or devices that do not fit, or a run that cannot be continued.
    """
    started = time.monotonic()
    log: LogLine = functools.partial(print, flush=True) if processes.first else lambda _: None
    output_dir = pathlib.Path(processes.share(lambda: str(directory.check(config.run.output_dir, config.run.resume))))
    inputs.require_files(config)
    with contextlib.ExitStack() as stack:
        # The lock comes first: no minutes are spent on a directory that another process trains in.
        if processes.first:
            stack.enter_context(directory.locked(output_dir, config.run.resume))
        opened = stack.enter_context(
            session.opened(config.device, log, config.model.deterministic, of_all_processes=True)
        )
        execution = _Execution(output_dir, processes, opened.devices, opened.mesh, stop_signal, log)
        sources, candidates = execution.open_inputs(config)
        config = inputs.adopt_prm_options(config, sources, log)
        watch = out_of_memory.Watch(config.model, config.optimizer, config.packing, config.lora, config.frozen)
        with watch.explained(*_of_setup(config)):
            made = setup(config, execution.mesh, sources, log=log, turns=processes.one_after_the_first)
        result, num_new, received = execution.train(config, made, watch)
        if not result.complete and received is not None:
            log(f"stopped by {received.name} after step {result.step:,}, which is saved; {resume_with(output_dir)}")
            return exit_status(config, received)
        log(f"done        {counted(num_new, 'step')} in {duration(time.monotonic() - started)}")
        if sources.candidates:
            with watch.explained(*_of_best_of_n(execution.output_dir)):
                execution.rank_candidates(config, candidates, result.step)
        execution.log_outputs(config, made.num_steps)
        return 0


@dataclasses.dataclass(frozen=True)
class _Execution:
    """Where a run executes, and the parts of it that need devices."""

    output_dir: pathlib.Path
    processes: Processes
    devices: Sequence[jax.Device]
    mesh: Mesh
    stop_signal: StopSignal
    log: LogLine

    def open_inputs(self, config: TrainConfig) -> tuple[Sources, list[Question]]:
        """The input files, and the candidates of Best-of-N, read now so that a bad file costs no run."""
        with self.processes.one_after_the_first():  # it writes synthetic files, which the others then find
            sources = inputs.materialise(config, self.output_dir)
            candidates = inputs.open_candidates(sources.candidates, config.eval.bon_n) if sources.candidates else []
        return sources, candidates

    def train(
        self, config: TrainConfig, made: Setup, watch: out_of_memory.Watch
    ) -> tuple[LoopResult, int, signal.Signals | None]:
        """Train from the newest checkpoint or from the start.

        Returns:
          The result, the number of steps left at the start, and the signal that any of the processes received.
        """
        # Hosts and processes are no part of a run, which may be resumed on others.
        kept = dataclasses.replace(config, distributed=DistributedConfig())
        fingerprint = identity.fingerprint(config, made)
        # A process with another mesh or another time to evaluate would leave the others waiting.
        described = {**config_files.as_dict(kept), **fingerprint, "JAX": jax.__version__}
        self.processes.require_equal("what is trained", described)
        meta = {"fingerprint": fingerprint, "config": config_files.as_dict(kept)}
        plan = self._plan(config, made, watch, meta)
        created = None
        if not self._newest_checkpoint(config, made):
            with watch.explained():
                created, source = made.create_state()
            self.log(f"weights     {source}")
        with contextlib.ExitStack() as stack, self.processes.guard(), watch.explained():
            stop = StopVote(stack.enter_context(self.stop_signal.installed()), self.devices, self.processes.count)
            run = config.run
            options = (run.keep_checkpoints, run.keep_best, self.processes, made.data.held_out_digest)
            checkpoints = stack.enter_context(contextlib.closing(saving.Checkpoints(self.output_dir, *options)))
            batches = stack.enter_context(contextlib.closing(made.data.loader.iterator()))
            if created is not None:
                position = Position(created)
            else:
                require_same = functools.partial(identity.require_same, self.output_dir, current=fingerprint)
                restored = checkpoints.restore_newest(made.program.abstract_state(), require_same, self.log)
                batches.set_state(restored.data)
                position = Position(restored.state, restored.step, restored.meta["metrics"] is not None)
                self.log(f"resume      {self.output_dir} after step {position.step:,}")
            writers = self._open_writers(stack, kept, made, position, checkpoints)
            result = loop.train(plan, position, batches, writers, stop)
        return result, made.num_steps - position.step, stop.received

    def _plan(
        self, config: TrainConfig, made: Setup, watch: out_of_memory.Watch, meta: Mapping[str, Any]
    ) -> TrainingPlan:
        built, held_out = made.program, made.data.held_out
        eval_step = watch.watched(built.eval_step, "an evaluation")
        evaluate = functools.partial(evaluation.evaluate, eval_step, held_out, built.batch_shardings)
        return TrainingPlan(
            train_step=watch.watched(built.train_step, "a training step"),
            evaluate=evaluate if held_out else None,
            shardings=built.batch_shardings,
            num_steps=made.num_steps,
            config=config.run,
            meta=meta,
            flops=functools.partial(step_flops, made.network),
            measure=functools.partial(devices.memory, self.devices),
        )

    def _newest_checkpoint(self, config: TrainConfig, made: Setup) -> int:
        """The newest checkpoint's step, 0 without one; also checks that the disk holds the checkpoints to come."""
        present = self.processes.share(lambda: retention.complete(self.output_dir / retention.CHECKPOINTS))
        start = max(present, default=0)
        if start < made.num_steps:  # before anything is written, as this may fail
            abstract = made.program.abstract_state()
            note = disk.require_room(self.output_dir, abstract, config.run, made.num_steps, len(present))
            if note:
                self.log(note)
        if not start and config.run.resume != "never":
            self.log(f"resume      {self.output_dir} has no checkpoint yet: from the start")
        return start

    def _open_writers(
        self,
        stack: contextlib.ExitStack,
        kept: TrainConfig,
        made: Setup,
        position: Position,
        checkpoints: saving.Checkpoints,
    ) -> Writers:
        """Metrics and progress, which the main process writes; the description of the run is written first."""
        metrics: MetricWriter = NullWriter()
        stream = sys.stdout if self.processes.first else io.StringIO()
        peak = peak_flops(kept, self.devices)
        progress = Progress(stream, position.step, made.num_steps, kept.run.log_every, peak_flops=peak)
        if self.processes.first:
            write_description(kept, self.output_dir, made)
            run = LoggedRun(self.output_dir, position.step, config_files.as_dict(kept))
            loggers = Loggers(kept.run.logger, run, progress.log)
            log = MetricLog(self.output_dir, position.step, position.evaluated, loggers=loggers)
            metrics = stack.enter_context(contextlib.closing(log))
        stack.callback(progress.finish)
        return Writers(checkpoints, metrics, progress)

    def rank_candidates(self, config: TrainConfig, candidates: list[Question], step: int) -> None:
        """Best-of-N with the last checkpoint. Signals end the process at once again: all is saved."""
        self.stop_signal.do_not_wait()
        scored = best_of_n.score(config, candidates, self.output_dir, step, self.mesh)
        if self.processes.first:
            self.log(best_of_n.write(config, scored, self.output_dir))

    def log_outputs(self, config: TrainConfig, step: int) -> None:
        """The lines that name what the run wrote."""
        self.log(f"checkpoint  {self.output_dir / retention.CHECKPOINTS / str(step)}")
        best = self.output_dir / retention.BEST
        if config.run.keep_best != "none" and best.exists():
            self.log(f"best        {best} is step {best.resolve().name}, by {config.run.keep_best}")
        self.log(f"metrics     {self.output_dir / directory.METRICS}")
        if "tensorboard" in config.run.logger:
            self.log(f"tensorboard --logdir={self.output_dir / directory.TENSORBOARD}")


def _of_setup(config: TrainConfig) -> tuple[str, str]:
    """What setup computes on the devices, and the flags with which it needs less memory."""
    if config.frozen.cached:
        more = f"a shorter --max_length than {config.encoding.max_length}, or {out_of_memory.MORE_DEVICES}"
        return "the frozen weights, and a solution's pass through them for --cache_frozen,", more
    return "the frozen weights", out_of_memory.MORE_DEVICES


def _of_best_of_n(output_dir: pathlib.Path) -> tuple[str, str]:
    """The same for Best-of-N, before which all checkpoints are saved."""
    apart = (
        f"python -m cfprm_jax.score --checkpoint={output_dir} and bon, on a larger device; the run itself is complete"
    )
    return "the scoring of --bon_candidates", f"--resume=auto with {out_of_memory.MORE_DEVICES}, or {apart}"


def write_description(config: TrainConfig, output_dir: pathlib.Path, made: Setup) -> None:
    """All files of a run directory that are written once."""
    config_files.write_config(config, output_dir)
    directory.write_corpus(output_dir, {**made.data.report, "held_out": made.data.held_out_report})
    model_files.write_model(
        output_dir,
        made.network.raw,
        made.tokenizer,
        model=config.model,
        encoding=config.encoding,
        loss=config.loss,
        granularity=config.granularity,
        source=made.sources.model,
        frozen=made.frozen,
    )


def step_flops(network: Network, batch: Batch) -> float:
    """FLOPs that the network needs for a training step on a batch."""
    pairs = flops.visible_pairs(batch.packed, batch.tokens_computed)
    return flops.train_flops(network.config, batch.tokens_computed, pairs, network.partition)


def peak_flops(config: TrainConfig, chosen: Sequence[jax.Device]) -> float | None:
    """Peak FLOP/s of all devices together; None where it is not known or a run does not compute in bfloat16."""
    peak = flops.peak_flops(chosen[0].device_kind)
    return None if peak is None or config.model.dtype != "bfloat16" else peak * len(chosen)
