"""python -m cfprm_jax.train: from labelled solutions and a backbone to a trained process reward model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import transformers
from jax.sharding import Mesh

from cfprm_jax import bon, flags
from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    EvalConfig,
    GranularityConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    ReadConfig,
    RunConfig,
    option,
)
from cfprm_jax.data.corpus import open_corpus
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import Batch, Loader, difference, evaluation_batches
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation import report
from cfprm_jax.evaluation.answers import grade
from cfprm_jax.evaluation.candidates import Question, read_candidates
from cfprm_jax.inference import load as load_inference
from cfprm_jax.inference.rows import scored_questions
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models import hf, parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.progress import ProgressLine
from cfprm_jax.training import (
    caches,
    checkpoint,
    devices,
    evaluation,
    loop,
    program,
    run_directory,
    sharding,
    summary,
)
from cfprm_jax.training.metrics import MetricLog, Progress, duration

SYNTHETIC = "synthetic"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a process reward model on labelled solutions, coarse to fine.

    python -m cfprm_jax.train --model=DIRECTORY --train_data=FILES --c_max=2 --output_dir=RUN

    Writes checkpoints, metrics.jsonl, TensorBoard events and the resolved flags into --output_dir. On SIGTERM or Ctrl-C
    it saves and says how to go on; when it was killed, --resume=auto goes on from the newest checkpoint, to the same
    result.
    """

    train_data: tuple[str, ...] = option(
        (SYNTHETIC,),
        "Corpora: files or globs, comma-separated; synthetic is an arithmetic world made here.",
        kind="list",
    )
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    granularity: GranularityConfig = dataclasses.field(default_factory=GranularityConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


class Sources(NamedTuple):
    """The files behind the options, with what "synthetic" stands for written out."""

    model: pathlib.Path
    init: str  # pretrained or random
    train: tuple[str, ...]
    held_out: tuple[str, ...]  # empty: a share of the questions of train
    candidates: str


class Network(NamedTuple):
    """The PRM, without any weights."""

    config: PRMConfig
    raw: dict[str, Any]  # the backbone's config.json
    shardings: Any  # of the parameters


class Data(NamedTuple):
    """Where batches come from."""

    loader: Loader
    held_out: list[Batch]
    report: dict[str, Any]  # of the training corpus


Say = Callable[[str], None]


def main(config: TrainConfig) -> int:
    """The command."""
    started = time.monotonic()
    output_dir = run_directory.check(config.run.output_dir, config.run.resume)
    chosen = devices.select(config.device.platform)
    devices.keep_freed_memory(chosen)
    say: Say = functools.partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    caches.use_compile_cache(config.run.compile_cache_dir)
    mesh = sharding.make_mesh(config.device, chosen)
    say(f"devices     {devices.describe(chosen)}, mesh {', '.join(f'{k}={v}' for k, v in mesh.shape.items())}")
    if config.device.platform == "auto" and (note := devices.unused_accelerator(chosen)):
        say(note)

    sources = materialise(config, output_dir)
    candidates = open_candidates(sources.candidates, config.eval.bon_n) if sources.candidates else []
    network = open_network(config, sources, mesh)
    say(f"model       {summary.model(network.config, str(sources.model))}")
    tokenizer = load_tokenizer(sources.model, config.encoding.marker, network.config.backbone.vocab_size)
    data = open_data(config, sources, tokenizer, mesh, say)
    num_steps = min(data.loader.num_steps, config.run.max_steps or data.loader.num_steps)
    say(f"steps       {summary.steps(num_steps, data.loader, config.granularity, config.packing, config.loss)}")

    built = program.build(network.config, config.loss, config.optimizer, num_steps, mesh)
    job = loop.Job(
        train_step=built.train_step,
        evaluate=functools.partial(evaluation.evaluate, built.eval_step, data.held_out, built.batch_shardings),
        shardings=built.batch_shardings,
        num_steps=num_steps,
        config=config.run,
        meta={"fingerprint": fingerprint(config, data.loader, num_steps), "config": flags.as_dict(config)},
    )
    start = checkpoint.newest(output_dir) or 0
    if not start:  # before anything is written, as this may fail
        if config.run.resume != "never":
            say(f"resume      {output_dir} has no checkpoint yet: from the start")
        params, origin = initial_params(config, sources, network)
        say(f"weights     {origin}")
        state = built.init_state(params)
        del params  # donated with the state to the first step
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(run_directory.locked(output_dir, config.run.resume))
        if (checkpoint.newest(output_dir) or 0) != start:
            raise UserError(f"--output_dir={output_dir}: another process has just trained there; start again")
        stop = stack.enter_context(loop.StopSignal().installed())
        checkpoints = stack.enter_context(
            contextlib.closing(checkpoint.Checkpoints(output_dir, config.run.keep_checkpoints))
        )
        batches = stack.enter_context(contextlib.closing(data.loader.iterator()))
        if start:
            refuse_another_run(output_dir, checkpoints.meta(start)["fingerprint"], job.meta["fingerprint"])
            restored = checkpoints.restore(start, built.abstract_state())
            state = restored.state
            batches.set_state(restored.data)
            say(f"resume      {output_dir} after step {start:,}")
        if jax.process_index() == 0:
            flags.write_config(config, output_dir)
            run_directory.write_corpus(output_dir, data.report)
            run_directory.write_model(
                output_dir,
                network.raw,
                tokenizer,
                config.model,
                config.encoding,
                config.loss,
                config.granularity,
                sources.model,
            )
        log = stack.enter_context(contextlib.closing(MetricLog(output_dir, start)))
        progress = Progress(sys.stdout, start, num_steps, config.run.log_every)
        stack.callback(progress.finish)
        outcome = loop.train(job, state, start, batches, checkpoints, log, progress, stop)
    if outcome.stopped:
        flagfile = shlex.quote(str(output_dir / run_directory.FLAGS))
        say(f"stopped by {stop.name} after step {outcome.step:,}, which is saved")
        say(f"resume with: python -m cfprm_jax.train --flagfile={flagfile} --resume=auto")
        return 130 if stop.received == signal.SIGINT else 0
    say(f"done        {num_steps - start:,} steps in {duration(time.monotonic() - started)}")
    if sources.candidates:
        del state, outcome  # the optimizer's memory
        best_of_n(config, candidates, output_dir, mesh, say)
    say(f"checkpoint  {output_dir / run_directory.CHECKPOINTS / str(num_steps)}")
    say(f"metrics     {output_dir / run_directory.METRICS}")
    say(f"tensorboard --logdir={output_dir / run_directory.TENSORBOARD}")
    return 0


def materialise(config: TrainConfig, output_dir: pathlib.Path) -> Sources:
    """The files to use; the synthetic ones are written, the same for the same seed, into output_dir/synthetic.

    Raises:
      UserError: no training data is named, or synthetic beside files.
    """
    if not config.train_data:
        raise UserError("--train_data is empty: name the corpora to train on, or synthetic")
    if SYNTHETIC in config.train_data and len(config.train_data) > 1:
        raise UserError(f"--train_data={','.join(config.train_data)}: synthetic stands alone or not at all")
    sources = Sources(
        pathlib.Path(config.model.model),
        config.model.init,
        config.train_data,
        config.eval.eval_data,
        config.eval.bon_candidates,
    )
    synthetic_data = config.train_data == (SYNTHETIC,)
    if config.model.model == SYNTHETIC and not synthetic_data:
        raise UserError(
            "--model is missing: name the backbone's Hugging Face directory "
            "(the synthetic one is for --train_data=synthetic)"
        )
    if not (synthetic_data or SYNTHETIC in (config.model.model, config.eval.bon_candidates)):
        return sources
    from cfprm_jax import synthetic  # only a run that wants it pays for it

    made = synthetic.materialise(output_dir / SYNTHETIC, config.run.seed)
    if synthetic_data:
        sources = sources._replace(train=(str(made.train),), held_out=sources.held_out or (str(made.held_out),))
    if config.model.model == SYNTHETIC:
        sources = sources._replace(model=pathlib.Path(made.model), init="random")
    if config.eval.bon_candidates == SYNTHETIC:
        sources = sources._replace(candidates=str(made.candidates))
    return sources


def open_network(config: TrainConfig, sources: Sources, mesh: Mesh) -> Network:
    """Shapes and shardings, before any weight is read. UserError for a mesh that does not divide them."""
    backbone, raw = hf.read_config(sources.model)
    backbone.refuse_length(config.encoding.max_length)
    model = config.model
    network = PRMConfig(backbone, model.head, model.dtype, model.attention, model.remat)
    return Network(network, raw, sharding.param_shardings(mesh, parameters.param_specs(network)))


def open_data(
    config: TrainConfig,
    sources: Sources,
    tokenizer: transformers.PreTrainedTokenizerBase,
    mesh: Mesh,
    say: Say,
) -> Data:
    """The training batches, and those of the held-out split (none when there is no such split)."""
    cache = caches.cache_directory(config.run.data_cache_dir, "corpora")
    fraction = 0.0 if sources.held_out else config.eval.eval_fraction

    def corpus(paths: tuple[str, ...], granularity: GranularityConfig, questions: str) -> Any:
        line = ProgressLine(sys.stdout)

        def report_share(share: float) -> None:
            if jax.process_index() == 0:
                line.show(lambda: f"tokenising  {share:.0%} of the corpus, {duration(line.elapsed)} so far")

        opened = open_corpus(
            paths, config.read, granularity, config.encoding, tokenizer, cache, questions, fraction, report_share
        )
        line.clear()
        return opened

    train = corpus(sources.train, config.granularity, "train" if fraction else "all")
    for line in summary.corpus(train.report):
        say(f"train       {line}")
    rows = sharding.row_multiple(mesh)
    loader = Loader(
        train,
        config.granularity,
        config.packing,
        config.encoding,
        config.run.seed,
        rows * config.optimizer.accumulation,
    )
    held_out: list[Batch] = []
    if fraction or sources.held_out:
        finest = dataclasses.replace(config.granularity, granularities=(str(train.granularities[0]),))
        split = corpus(sources.held_out or sources.train, finest, "held_out" if fraction else "all")
        held_out = evaluation_batches(split, config.packing, config.encoding, config.eval.eval_max_trajectories, rows)
    number = sum(batch.trajectories for batch in held_out)
    say(f"held out    {number:,} trajectories" if held_out else "held out    no question, so there is no evaluation")
    return Data(loader, held_out, train.report)


def open_candidates(path: str, sizes: tuple[str, ...]) -> list[Question]:
    """The candidates to choose from after training, read before it, so that a bad file costs no run.

    Raises:
      UserError: the file is no candidates file, a question has fewer candidates than the largest of sizes, or a
        candidate does not say whether it is correct.
    """
    questions = list(read_candidates([path]))
    largest = max(bon.parse_sizes(sizes, "--bon_n"))
    for question in questions:
        if len(question.candidates) < largest:
            raise UserError(
                f"{question.source}: {len(question.candidates)} candidates, but --bon_n wants to choose among {largest}"
            )
        grade(question, bon.BonConfig().grader)
    return questions


def best_of_n(config: TrainConfig, questions: list[Question], output_dir: pathlib.Path, mesh: Mesh, say: Say) -> None:
    """Score the candidates with the newest checkpoint, as score would, and write and show what bon makes of them."""
    loaded = load_inference.open_prm(output_dir, config.model.dtype, config.model.attention, mesh)
    scored = list(scored_questions(questions, Scorer(loaded, mesh=mesh)))
    directory = output_dir / "best_of_n"
    choice = bon.BonConfig(input=(config.eval.bon_candidates,), n=config.eval.bon_n, output_dir=str(directory))
    outcome, text = bon.evaluate(scored, choice)
    flags.write_config(choice, directory)
    report.write(outcome, text, directory)
    say(f"\n{text}")


def initial_params(config: TrainConfig, sources: Sources, network: Network) -> tuple[Any, str]:
    """Float32 parameters in their shardings, and a phrase that says where they come from."""
    key = jax.random.key(config.run.seed)
    if sources.init == "random":
        make = jax.jit(
            functools.partial(parameters.init_params, network.config, dtype=jnp.float32),
            out_shardings=network.shardings,
        )
        return make(key), f"random, seed {config.run.seed}"
    params, report = hf.load_params(
        sources.model, network.config, shardings=network.shardings, dtype=jnp.float32, head_key=key
    )
    return params, str(report)


def fingerprint(config: TrainConfig, loader: Loader, num_steps: int) -> dict[str, Any]:
    """What must be the same for a run to go on: the data, and the options that the result depends on."""
    options = flags.as_dict(config.model) | flags.as_dict(config.loss) | flags.as_dict(config.optimizer)
    # Where and in how many parts a step is computed changes rounding at most.
    for name in ("attention", "remat", "accumulation"):
        del options[name]
    return {**loader.fingerprint, **options, "steps of the run": num_steps}


def refuse_another_run(output_dir: pathlib.Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """UserError naming every option that a resumed run has changed."""
    changed = difference(saved, current)
    if changed:
        raise UserError(
            f"--resume: {output_dir} was trained with other data or options: {changed}. Its own are in "
            f"{output_dir / run_directory.FLAGS}: --flagfile={output_dir / run_directory.FLAGS} --resume=auto"
        )


if __name__ == "__main__":
    sys.exit(flags.run(TrainConfig, main))
