"""The training loop: batch, step, report, evaluate, save, in this order, until the end or a signal.

All processes of a run go through it in step: what one does, all do, at the same step.

Devices run ahead of the host: a step is dispatched, and while it runs the host reports the one before it and prepares
the next batch. Only an evaluation and a checkpoint wait for the newest step.
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
from cfprm_jax.run.metrics import EVALUATION, Log, Progress
from cfprm_jax.sharding import rules
from cfprm_jax.training.step import TrainState

# Sources of a bad batch that its error names; the rest are counted.
_SOURCES_NAMED = 5


class BatchIterator(Protocol):
    """What the loop asks of the loader's iterator: after the k-th batch its state stands for batches k + 1 and on."""

    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Job:
    """What the loop runs; the same after a resume."""

    train_step: Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, jax.Array]]]
    # (params, stop) -> metrics, or None if stop() ended it; None where there is nothing to evaluate on
    evaluate: Callable[[Any, Callable[[], bool]], dict[str, float] | None] | None
    shardings: PackedBatch
    num_steps: int
    config: RunConfig
    meta: Mapping[str, Any]  # stored in every checkpoint
    flops: Callable[[Batch], float]  # that the model needs for a step on a batch
    measure: Callable[[], Mapping[str, Any]]  # more figures for the log, such as the devices' memory


class Outcome(NamedTuple):
    """How the loop ended."""

    step: int  # of the newest checkpoint
    complete: bool  # all steps and the last evaluation are done; otherwise it was told to stop


class _Pending(NamedTuple):
    """A step that was dispatched and not reported yet."""

    step: int
    batch: Batch
    metrics: dict[str, jax.Array]


def train(
    job: Job,
    state: TrainState,
    start_step: int,
    batches: BatchIterator,
    checkpoints: Checkpoints,
    log: Log,
    progress: Progress,
    stop: Callable[[], bool],
    evaluated: bool = True,
) -> Outcome:
    """Run steps start_step + 1 .. num_steps.

    There is a checkpoint every checkpoint_every steps, after an evaluation that is the best so far (where the best is
    kept), at the end, and where the signal came.

    Args:
      stop: whether to stop; asked by all processes alike, and the same for all.
      evaluated: False if the checkpoint of start_step has no evaluation. If one is due then, which a signal or a kill
        has ended, it comes first, and the checkpoint gets it.

    Raises:
      UserError: a loss or gradient that is not finite, with step, sources of the batch and the last good checkpoint; or
        a checkpoint or a figure that cannot be written.
    """
    config, step, stopping = job.config, start_step, False
    pending: _Pending | None = None

    def report() -> None:
        nonlocal pending
        if pending is not None:
            _report(pending, job, checkpoints, log, progress)
            pending = None

    def evaluate() -> dict[str, float] | None:
        found = job.evaluate(state.params, stop) if job.evaluate is not None else None
        if found is not None:
            log.write(step, found, board="eval", prefix=EVALUATION)
            progress.say(f"step {step}: held-out {describe(found)}")
        return found

    def due() -> bool:
        at_this_step = step == job.num_steps or _divides(config.eval_every, step)
        return job.evaluate is not None and step > 0 and at_this_step

    if due() and not evaluated:
        evaluation = evaluate()
        if evaluation is not None:
            checkpoints.add_evaluation(step, evaluation)
        evaluated, stopping = evaluation is not None, stop()
    while step < job.num_steps and not stopping:
        batch = next(batches)
        state, metrics = job.train_step(state, rules.put_batch(batch.packed, job.shardings))
        step += 1
        report()
        pending = _Pending(step, batch, metrics)
        checkpoints.check()

        stopping, evaluation = stop(), None
        evaluated = not due()
        evaluate_now = due() and not stopping
        save_now = stopping or step == job.num_steps or _divides(config.checkpoint_every, step)
        if evaluate_now or save_now:
            report()  # so that no state is saved whose loss was not finite
        if evaluate_now:
            evaluation = evaluate()
            evaluated, stopping = evaluation is not None, stop()
            save_now = save_now or stopping or checkpoints.improves(evaluation)
        if save_now:
            checkpoints.save(step, state, batches.get_state(), {**job.meta, "step": step, "metrics": evaluation})
    checkpoints.wait()
    return Outcome(step, step == job.num_steps and (evaluated or job.evaluate is None))


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


def _report(pending: _Pending, job: Job, checkpoints: Checkpoints, log: Log, progress: Progress) -> None:
    """Wait for a step's metrics, refuse them if they are not finite, else write and show them."""
    step, batch = pending.step, pending.batch
    metrics = {name: float(value) for name, value in jax.device_get(pending.metrics).items()}
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            checkpoints.wait()
            good = checkpoints.latest
            sources = list(dict.fromkeys(batch.sources))
            named = ", ".join(sources[:_SOURCES_NAMED])
            more = f" and {len(sources) - _SOURCES_NAMED} more" if len(sources) > _SOURCES_NAMED else ""
            raise UserError(
                f"step {step}: {name} is {metrics[name]}; granularity {batch.granularity}, its batch came from "
                f"{named}{more}; last good checkpoint: "
                + (f"{checkpoints.directory / str(good)}" if good is not None else "none was written yet")
            )
    values = {
        **metrics,
        "granularity": batch.granularity,
        "epoch": batch.epoch,
        "stage": batch.stage,
        "trajectories": batch.trajectories,
        "tokens_computed": batch.tokens_computed,
        "tokens_expanded": batch.tokens_expanded,
        **progress.advance(step, batch.tokens_computed, batch.tokens_expanded, job.flops(batch)),
        **job.measure(),
    }
    log.write(step, values, board="train" if _divides(job.config.log_every, step) else "")
    progress.show(step, values)
