"""The training loop: batch, step, log, evaluate, save, in this order, until the end or a signal.

All processes of a run execute it in lockstep: each takes the same branch at the same step.

Devices run ahead of the host: a step is dispatched, and while it runs the host logs the one before it and prepares the
next batch. Only an evaluation and a checkpoint wait for the newest step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

from cfprm_jax.checkpoints.saving import Checkpoints
from cfprm_jax.config import RunConfig
from cfprm_jax.data.loader import Batch
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.run.evaluation import DISTINCT
from cfprm_jax.run.metrics import EVALUATION, MetricWriter, Progress
from cfprm_jax.sharding import rules
from cfprm_jax.training.step import TrainState

# Sources of a bad batch that its error names; the rest are counted.
_SOURCES_NAMED = 5


class BatchIterator(Protocol):
    """The loader's iterator. After batch k its state stands for batches k + 1 and later."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The work of the loop; the same after a resume.

    Attributes:
      train_step: (state, batch) -> (state, metrics); the state is donated.
      evaluate: (params, stop) -> metrics, or None if stop() ended it; None without a held-out split.
      shardings: of a batch.
      num_steps: optimizer steps of the run.
      config: when to log, evaluate and save.
      meta: stored in every checkpoint.
      flops: FLOPs of the model for a step on a batch.
      measure: further figures for the log, such as memory in use.
    """

    train_step: Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Callable[[], bool]], dict[str, float] | None] | None
    shardings: PackedBatch
    num_steps: int
    config: RunConfig
    meta: Mapping[str, Any]
    flops: Callable[[Batch], float]
    measure: Callable[[], Mapping[str, Any]]


class Position(NamedTuple):
    """Where the loop starts.

    Attributes:
      state: after `step` optimizer steps.
      step: 0 for a new run, otherwise that of the restored checkpoint.
      evaluated: False if the checkpoint lacks an evaluation, which a signal or a kill ended. If one is due at this
        step it comes first, and the checkpoint gets it.
    """

    state: TrainState
    step: int = 0
    evaluated: bool = True


class Writers(NamedTuple):
    """Where the loop writes."""

    checkpoints: Checkpoints
    metrics: MetricWriter
    progress: Progress


class LoopResult(NamedTuple):
    """How the loop ended."""

    step: int  # of the newest checkpoint
    complete: bool  # all steps and the last evaluation are done; otherwise a signal stopped it


def train(
    plan: TrainingPlan, start: Position, batches: BatchIterator, writers: Writers, stop: Callable[[], bool]
) -> LoopResult:
    """Run steps start.step + 1 .. num_steps.

    There is a checkpoint every checkpoint_every steps, after an evaluation that is the best so far (where the best is
    kept), at the end, and where a signal stops the run.

    Args:
      stop: whether to stop; the same answer in all processes, which all call it.

    Raises:
      UserError: a loss or gradient that is not finite, with step, sources of the batch and the last good checkpoint; or
        a checkpoint or metric that cannot be written.
    """
    loop = _Loop(plan, start, writers, stop)
    loop.make_up_evaluation()
    while loop.step < plan.num_steps and not loop.stopping:
        loop.dispatch(next(batches))
        loop.log_previous()
        writers.checkpoints.check()
        loop.stopping = stop()
        evaluation = loop.evaluate_if_due()
        if loop.save_due(evaluation):
            loop.save(batches.get_state(), evaluation)
    writers.checkpoints.wait()
    return LoopResult(loop.step, loop.complete())


class _Dispatched(NamedTuple):
    """A step whose metrics are not logged yet."""

    step: int
    batch: Batch
    metrics: dict[str, jax.Array]


class _Loop:
    """State of the loop between its parts.

    Attributes:
      state, step: of the newest step, which may still run on the devices.
      evaluated: whether the evaluation that is due at this step, if any, is done.
      stopping: whether to end after this step.
    """

    def __init__(self, plan: TrainingPlan, start: Position, writers: Writers, stop: Callable[[], bool]) -> None:
        self.plan, self.writers, self.stop = plan, writers, stop
        self.state, self.step, self.evaluated = start
        self.stopping = False
        self._newest: _Dispatched | None = None  # not logged yet
        self._previous: _Dispatched | None = None

    def make_up_evaluation(self) -> None:
        """The evaluation that is due at the start and missing in its checkpoint."""
        if self.evaluated or not self._evaluation_due():
            return
        evaluation = self._evaluate()
        if evaluation is not None:
            self.writers.checkpoints.add_evaluation(self.step, evaluation)
        self.evaluated, self.stopping = evaluation is not None, self.stop()

    def dispatch(self, batch: Batch) -> None:
        """Start a step on the devices."""
        placed = rules.put_batch(batch.packed, self.plan.shardings)
        self.state, metrics = self.plan.train_step(self.state, placed)
        self.step += 1
        self._previous, self._newest = self._newest, _Dispatched(self.step, batch, metrics)

    def log_previous(self) -> None:
        """Log the step before the newest, which is complete or nearly so."""
        if self._previous is not None:
            _log(self._previous, self.plan, self.writers)
            self._previous = None

    def evaluate_if_due(self) -> dict[str, float] | None:
        """The metrics of an evaluation at this step; None if none is due or a signal ended it."""
        self.evaluated = not self._evaluation_due()
        if self.evaluated or self.stopping:
            return None
        self._log_newest()
        evaluation = self._evaluate()
        self.evaluated, self.stopping = evaluation is not None, self.stop()
        return evaluation

    def save_due(self, evaluation: dict[str, float] | None) -> bool:
        """Whether to save a checkpoint at this step."""
        return (
            self.stopping
            or self.step == self.plan.num_steps
            or _divides(self.plan.config.checkpoint_every, self.step)
            or (evaluation is not None and self.writers.checkpoints.improves(evaluation))
        )

    def save(self, data: dict[str, Any], evaluation: dict[str, float] | None) -> None:
        """Save a checkpoint; data is the state of the iterator."""
        self._log_newest()  # no state is saved whose loss was not finite
        meta = {**self.plan.meta, "step": self.step, "metrics": evaluation}
        self.writers.checkpoints.save(self.step, self.state, data, meta)

    def complete(self) -> bool:
        """Whether all steps and the last evaluation are done."""
        return self.step == self.plan.num_steps and (self.evaluated or self.plan.evaluate is None)

    def _evaluation_due(self) -> bool:
        at_this_step = self.step == self.plan.num_steps or _divides(self.plan.config.eval_every, self.step)
        return self.plan.evaluate is not None and self.step > 0 and at_this_step

    def _evaluate(self) -> dict[str, float] | None:
        if self.plan.evaluate is None:
            return None
        metrics = self.plan.evaluate(self.state.params, self.stop)
        if metrics is not None:
            self.writers.metrics.write(self.step, metrics, board="eval", prefix=EVALUATION)
            self.writers.progress.log(f"step {self.step}: held-out {describe(metrics)}")
        return metrics

    def _log_newest(self) -> None:
        if self._newest is not None:
            _log(self._newest, self.plan, self.writers)
            self._newest = None


def describe(evaluation: Mapping[str, float]) -> str:
    """The figures of an evaluation in one line."""
    once = ""
    if f"{DISTINCT}auroc" in evaluation:
        own = {name: evaluation[f"{DISTINCT}{name}"] for name in ("negative_f1", "auroc", "positives", "negatives")}
        once = (
            f"; distinct: negative F1 {own['negative_f1']:.4f}  AUROC {own['auroc']:.4f}  over {own['positives']:,.0f} "
            f"and {own['negatives']:,.0f}"
        )
    if "redundancy_auroc" in evaluation:
        once += (
            f"; redundancy AUROC {evaluation['redundancy_auroc']:.4f} over {evaluation['redundant']:,.0f} redundant "
            f"and {evaluation['of_use']:,.0f} of use"
        )
    return (
        f"loss {evaluation['loss']:.4f}  step accuracy {evaluation['step_accuracy']:.4f}  "
        f"negative F1 {evaluation['negative_f1']:.4f} (precision {evaluation['negative_precision']:.4f}, "
        f"recall {evaluation['negative_recall']:.4f})  AUROC {evaluation['auroc']:.4f}  "
        f"over {evaluation['positives']:,.0f} positive and {evaluation['negatives']:,.0f} negative steps{once}"
    )


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _log(dispatched: _Dispatched, plan: TrainingPlan, writers: Writers) -> None:
    """Wait for a step's metrics and log them. UserError if loss or gradient are not finite."""
    step, batch = dispatched.step, dispatched.batch
    metrics = {name: float(value) for name, value in jax.device_get(dispatched.metrics).items()}
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            raise _not_finite(name, metrics[name], step, batch, writers.checkpoints)
    values = {
        **metrics,
        "granularity": batch.granularity,
        "epoch": batch.epoch,
        "stage": batch.stage,
        "trajectories": batch.trajectories,
        "tokens_computed": batch.tokens_computed,
        "tokens_expanded": batch.tokens_expanded,
        **writers.progress.advance(step, batch.tokens_computed, batch.tokens_expanded, plan.flops(batch)),
        **plan.measure(),
    }
    writers.metrics.write(step, values, board="train" if _divides(plan.config.log_every, step) else "")
    writers.progress.show(step, values)


def _not_finite(name: str, value: float, step: int, batch: Batch, checkpoints: Checkpoints) -> UserError:
    """The error of a step whose loss or gradient is not finite."""
    checkpoints.wait()
    good = checkpoints.latest
    sources = list(dict.fromkeys(batch.sources))
    named = ", ".join(sources[:_SOURCES_NAMED])
    more = f" and {len(sources) - _SOURCES_NAMED} more" if len(sources) > _SOURCES_NAMED else ""
    return UserError(
        f"step {step}: {name} is {value}; granularity {batch.granularity}, its batch came from {named}{more}; "
        "last good checkpoint: "
        + (f"{checkpoints.directory / str(good)}" if good is not None else "none was written yet")
    )
