"""python -m cfprm_jax.train: from labelled solutions and a backbone to a trained process reward model."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

from cfprm_jax.runtime.signals import StopSignal

if __name__ == "__main__":
    # Before the other imports, which take seconds. A SIGTERM that comes meanwhile is answered when the flags are known.
    ASKED = StopSignal()
    ASKED.end_with(process.end_by_interrupt)
    ASKED.install()

import contextlib
import dataclasses
import functools
import io
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from cfprm_jax import flags
from cfprm_jax.checkpoints import model_files, retention, saving
from cfprm_jax.config import DistributedConfig
from cfprm_jax.data.candidates import Question
from cfprm_jax.data.loader import Batch, Loader, difference
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.huggingface import safetensors_files
from cfprm_jax.inference import load as load_inference
from cfprm_jax.inference.rows import scored_questions
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.report import best_of_n as best_of_n_report
from cfprm_jax.run import directory as run_directory
from cfprm_jax.run import evaluation, inputs, loop, validate
from cfprm_jax.run.inputs import LogLine, Network, Sources
from cfprm_jax.run.metrics import Log, MetricLog, Progress, SilentLog
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup, setup
from cfprm_jax.runtime import config_files, devices, digests, disk, distributed, out_of_memory
from cfprm_jax.runtime.distributed import Processes, StopVote
from cfprm_jax.runtime.progress import duration
from cfprm_jax.sharding import session
from cfprm_jax.training import flops

MODEL_CONTENT = "content of the model"


def main(config: TrainConfig, asked: StopSignal | None = None) -> int:
    """The command; with several processes, in each of them.

    Args:
      asked: what hears the signals of a process that is this command alone, and may end with it at any time; by default
        they are heard between the first training step and the last.
    """
    if asked is not None:
        asked.end_with(functools.partial(end_by_signal, config, Processes()))
    validate.refuse(config)
    with distributed.session(config.distributed, config.device.platform) as processes:
        if asked is not None:
            asked.end_with(functools.partial(end_by_signal, config, processes))
        asked = asked or StopSignal()
        status = run(config, processes, asked)
        asked()  # all is said and done: what comes now changes nothing
        return status


def run(config: TrainConfig, processes: Processes, asked: StopSignal) -> int:
    """One process's part of a run. The first prints and writes; the others compute."""
    started = time.monotonic()
    say: LogLine = functools.partial(print, flush=True) if processes.first else lambda _: None
    output_dir = pathlib.Path(
        processes.share(lambda: str(run_directory.check(config.run.output_dir, config.run.resume)))
    )
    # The lock comes before minutes are spent on what another process is doing already.
    with contextlib.ExitStack() as stack:
        if processes.first:
            stack.enter_context(run_directory.locked(output_dir, config.run.resume))
        opened = stack.enter_context(session.opened(config.device, say, config.model.deterministic))
        return run_on(opened, config, output_dir, processes, asked, say, started)


def run_on(
    opened: session.Session,
    config: TrainConfig,
    output_dir: pathlib.Path,
    processes: Processes,
    asked: StopSignal,
    say: LogLine,
    started: float,
) -> int:
    """The part of a run that needs devices."""
    chosen, mesh = opened
    with processes.one_after_the_first():  # it writes, and the others find it there
        sources = inputs.materialise(config, output_dir)
        candidates = inputs.open_candidates(sources.candidates, config.eval.bon_n) if sources.candidates else []
    config = inputs.adopt_prm_options(config, sources, say)
    # Where it runs is no part of a run, which may go on anywhere.
    kept = dataclasses.replace(config, distributed=DistributedConfig())
    made = setup(config, mesh, sources, log=say, turns=processes.one_after_the_first)
    network, data, num_steps, built = made.network, made.data, made.num_steps, made.program
    own = fingerprint(config, data.loader, num_steps, made.frozen, model_content(sources, network.raw))
    # Another mesh or another time to evaluate in one process would leave the others waiting for it.
    processes.require_equal("what is trained", {**config_files.as_dict(kept), **own, "JAX": jax.__version__})
    watch = out_of_memory.Watch(config.model, config.optimizer, config.packing)
    eval_step = watch.watched(built.eval_step, "an evaluation")
    evaluate = functools.partial(evaluation.evaluate, eval_step, data.held_out, built.batch_shardings)
    job = loop.Job(
        train_step=watch.watched(built.train_step, "a training step"),
        evaluate=evaluate if data.held_out else None,
        shardings=built.batch_shardings,
        num_steps=num_steps,
        config=config.run,
        meta={"fingerprint": own, "config": config_files.as_dict(kept)},
        flops=functools.partial(step_flops, network),
        measure=functools.partial(devices.memory, chosen),
    )
    present = processes.share(lambda: retention.complete(output_dir / retention.CHECKPOINTS))
    start = max(present, default=0)
    if start < num_steps:  # before anything is written, as this may fail
        say_if(disk.require_room(output_dir, built.abstract_state(), config.run, num_steps, len(present)), say)
    if not start:
        if config.run.resume != "never":
            say(f"resume      {output_dir} has no checkpoint yet: from the start")
        with watch.explained():
            state, source = made.create_state()
        say(f"weights     {source}")
    with contextlib.ExitStack() as stack, processes.guard(), watch.explained():
        stop = StopVote(stack.enter_context(asked.installed()), chosen, processes.count)
        checkpoints = stack.enter_context(
            contextlib.closing(
                saving.Checkpoints(output_dir, config.run.keep_checkpoints, config.run.keep_best, processes)
            )
        )
        batches = stack.enter_context(contextlib.closing(data.loader.iterator()))
        evaluated = True
        if start:
            refuse = functools.partial(refuse_another_run, output_dir, current=own)
            restored = checkpoints.restore_newest(built.abstract_state(), refuse, say)
            state, start, evaluated = restored.state, restored.step, restored.meta["metrics"] is not None
            batches.set_state(restored.data)
            say(f"resume      {output_dir} after step {start:,}")
            del restored  # its state is donated to the next step
        log: Log = SilentLog()
        if processes.first:
            write_description(kept, output_dir, made)
            log = stack.enter_context(contextlib.closing(MetricLog(output_dir, start, evaluated)))
        stream = sys.stdout if processes.first else io.StringIO()
        progress = Progress(stream, start, num_steps, config.run.log_every, peak_flops=peak_flops(config, chosen))
        stack.callback(progress.finish)
        outcome = loop.train(job, state, start, batches, checkpoints, log, progress, stop, evaluated)
    if not outcome.complete and stop.received is not None:
        say(f"stopped by {stop.received.name} after step {outcome.step:,}, which is saved; {resume_with(output_dir)}")
        return exit_status(config, stop.received)
    say(f"done        {num_steps - start:,} steps in {duration(time.monotonic() - started)}")
    if sources.candidates:
        del state  # the optimizer's memory
        asked.do_not_wait()
        best_of_n(config, candidates, output_dir, outcome.step, mesh, say, processes.first)
    say(f"checkpoint  {output_dir / retention.CHECKPOINTS / str(num_steps)}")
    say(f"metrics     {output_dir / run_directory.METRICS}")
    say(f"tensorboard --logdir={output_dir / run_directory.TENSORBOARD}")
    return 0


def write_description(config: TrainConfig, output_dir: pathlib.Path, made: Setup) -> None:
    """All files of a run directory that are written once."""
    config_files.write_config(config, output_dir)
    run_directory.write_corpus(output_dir, made.data.report)
    model_files.write_model(
        output_dir,
        made.network.raw,
        made.tokenizer,
        config.model,
        config.encoding,
        config.loss,
        config.granularity,
        made.sources.model,
        made.frozen,
    )


def say_if(note: str, say: LogLine) -> None:
    """LogLine a note if there is one."""
    if note:
        say(note)


def resume_with(output_dir: pathlib.Path) -> str:
    """How to go on with a run that has a checkpoint."""
    flagfile = shlex.quote(str(output_dir / run_directory.FLAGS))
    return f"resume with: python -m cfprm_jax.train --flagfile={flagfile} --resume=auto"


def exit_status(config: TrainConfig, received: signal.Signals) -> int:
    """What a run ends with that was told to stop."""
    return 130 if received == signal.SIGINT else config.run.preemption_exit_code


def end_by_signal(config: TrainConfig, processes: Processes, received: signal.Signals) -> NoReturn:
    """End at once, before the first step or when all steps are done: what is to be saved is saved."""
    output_dir = pathlib.Path(config.run.output_dir)
    saved = saving.newest(output_dir) if config.run.output_dir else None
    if saved is None:
        told = "no step is saved yet; start the same command again, with --resume=auto"
    else:
        told = f"step {saved:,} is saved; {resume_with(output_dir)}"
    processes.stop(f"stopped by {received.name}; {told}", exit_status(config, received))


def step_flops(network: Network, batch: Batch) -> float:
    """What the network needs for a training step on a batch."""
    pairs = flops.visible_pairs(batch.packed, batch.tokens_computed)
    return flops.train_flops(network.config, batch.tokens_computed, pairs, network.partition)


def peak_flops(config: TrainConfig, chosen: Sequence[jax.Device]) -> float | None:
    """What all devices can do in a second; None where that is not known, or a run does not compute in bfloat16."""
    peak = flops.peak_flops(chosen[0].device_kind)
    return None if peak is None or config.model.dtype != "bfloat16" else peak * len(chosen)


def best_of_n(
    config: TrainConfig,
    questions: list[Question],
    output_dir: pathlib.Path,
    step: int,
    mesh: Mesh,
    say: LogLine,
    writes: bool,
) -> None:
    """Score the candidates with the last checkpoint, as score would, and write and show what bon makes of them."""
    checkpoint = output_dir / retention.CHECKPOINTS / str(step)  # this one or none: not an older one
    loaded = load_inference.open_prm(checkpoint, config.model.dtype, config.model.attention, mesh)
    scored = list(scored_questions(questions, Scorer(loaded, mesh=mesh)))
    if not writes:
        return
    directory = output_dir / "best_of_n"
    choice = BonConfig(
        input=(config.eval.bon_candidates,), n=config.eval.bon_n, grader="none", output_dir=str(directory)
    )
    result = best_of_n_report.evaluate(scored, choice)
    config_files.write_config(choice, directory)
    best_of_n_report.write(result, directory)
    say(f"\n{result.summary}\nreport      {directory / 'report.html'}")


def model_content(sources: Sources, raw: dict[str, Any]) -> str | None:
    """What tells --model from others, wherever it is; None if its weights are gone, as a resumed run needs none."""
    weights = None
    if sources.init != "random":
        with contextlib.suppress(UserError):
            weights = safetensors_files.fingerprint(safetensors_files.list_directory(sources.model).tensors)
        if weights is None:
            return None
    # What may change when a directory is saved again.
    config = {name: value for name, value in raw.items() if name not in ("_name_or_path", "transformers_version")}
    return digests.of_json([weights, config])


def fingerprint(
    config: TrainConfig, loader: Loader, num_steps: int, frozen: Mapping[str, Any], model: str | None
) -> dict[str, Any]:
    """What must be the same for a run to go on: the data, and the options that the result depends on."""
    options = (
        config_files.as_dict(config.model) | config_files.as_dict(config.loss) | config_files.as_dict(config.optimizer)
    )
    # Where and in how many parts a step is computed changes rounding at most.
    for name in ("attention", "remat", "accumulation", "deterministic"):
        del options[name]
    for record in frozen.values():
        options["weights of the backbone"] = record["backbone_fingerprint"]
    if config.lora.lora_rank:
        options |= config_files.as_dict(config.lora)
    if config.frozen.frozen_layers:
        options["frozen_layers"] = config.frozen.frozen_layers
    return {**loader.fingerprint, **options, MODEL_CONTENT: model, "steps of the run": num_steps}


def refuse_another_run(output_dir: pathlib.Path, meta: dict[str, Any], current: dict[str, Any]) -> None:
    """UserError naming every option that a resumed run has changed."""
    saved = dict(meta["fingerprint"])
    # The content of the model decides, and its path only where the content is not known: in runs of earlier versions.
    known = saved.get(MODEL_CONTENT) is not None and current[MODEL_CONTENT] is not None
    left_out = "model" if known else MODEL_CONTENT
    saved, current = ({k: v for k, v in side.items() if k != left_out} for side in (saved, current))
    changed = difference(saved, current)
    if changed:
        raise UserError(
            f"--resume: {output_dir} was trained with other data or options: {changed}. Its own are in "
            f"{output_dir / run_directory.FLAGS}: --flagfile={output_dir / run_directory.FLAGS} --resume=auto"
        )


if __name__ == "__main__":
    sys.exit(flags.run(TrainConfig, functools.partial(main, asked=ASKED)))
