"""python -m cfprm_jax.train: from labelled solutions and a backbone to a trained process reward model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import pathlib
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import transformers
from jax.sharding import Mesh

from cfprm_jax import bon, flags
from cfprm_jax.config import (
    DeviceConfig,
    DistributedConfig,
    EncodingConfig,
    EvalConfig,
    GranularityConfig,
    LoraConfig,
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
from cfprm_jax.evaluation.candidates import Question, read_candidates
from cfprm_jax.inference import load as load_inference
from cfprm_jax.inference.rows import scored_questions
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models import hf, lora, parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.progress import ProgressLine
from cfprm_jax.training import (
    adapters,
    caches,
    checkpoint,
    devices,
    disk,
    distributed,
    evaluation,
    flops,
    loop,
    origin,
    program,
    run_directory,
    sharding,
    summary,
)
from cfprm_jax.training.distributed import Processes, StopVote
from cfprm_jax.training.metrics import Log, MetricLog, Progress, SilentLog, duration

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
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    granularity: GranularityConfig = dataclasses.field(default_factory=GranularityConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    packing: PackingConfig = dataclasses.field(default_factory=PackingConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)
    read: ReadConfig = dataclasses.field(default_factory=ReadConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    given: frozenset[str] = frozenset()  # names of the flags that were set


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
    adapters: Lora | None  # None: the whole network is trained


class Data(NamedTuple):
    """Where batches come from."""

    loader: Loader
    held_out: list[Batch]
    report: dict[str, Any]  # of the training corpus


Say = Callable[[str], None]


def main(config: TrainConfig) -> int:
    """The command; with several processes, in each of them."""
    with distributed.session(config.distributed, config.device.platform) as processes:
        return run(config, processes)


def run(config: TrainConfig, processes: Processes) -> int:
    """One process's part of a run. The first prints and writes; the others compute."""
    started = time.monotonic()
    say: Say = functools.partial(print, flush=True) if processes.first else lambda _: None
    output_dir = pathlib.Path(
        processes.share(lambda: str(run_directory.check(config.run.output_dir, config.run.resume)))
    )
    chosen = devices.select(config.device.platform)
    devices.keep_freed_memory(chosen)
    caches.use_compile_cache(config.run.compile_cache_dir)
    mesh = sharding.make_mesh(config.device, chosen)
    say(f"devices     {devices.describe(chosen)}, mesh {', '.join(f'{k}={v}' for k, v in mesh.shape.items())}")
    if config.device.platform == "auto" and (note := devices.unused_accelerator(chosen)):
        say(note)

    with processes.one_after_the_first():  # it writes, and the others find it there
        sources = materialise(config, output_dir)
        candidates = open_candidates(sources.candidates, config.eval.bon_n) if sources.candidates else []
    config = go_on_from_prm(config, sources, say)
    # Where it runs is no part of a run, which may go on anywhere.
    kept = dataclasses.replace(config, distributed=DistributedConfig())
    network = open_network(config, sources, mesh)
    weights = "float32" if network.adapters is None else config.model.dtype
    say(f"model       {summary.model(network.config, str(sources.model), weights)}")
    tokenizer = load_tokenizer(sources.model, config.encoding.marker, network.config.backbone.vocab_size)
    with processes.one_after_the_first():
        data = open_data(config, sources, tokenizer, mesh, say)
    num_steps = min(data.loader.num_steps, config.run.max_steps or data.loader.num_steps)
    say(f"steps       {summary.steps(num_steps, data.loader, config.granularity, config.packing, config.loss)}")

    built = program.build(network.config, config.loss, config.optimizer, num_steps, mesh, network.adapters)
    base, described = None, None
    if network.adapters is not None:
        described = adapters.record(network.adapters, sources.model, config.model.dtype)
        key = jax.random.key(config.run.seed)
        base = adapters.load_base(sources.model, network.config, config.model.dtype, mesh, key)
        built = built.bind(base.frozen)
        say(f"adapters    {adapters.describe(network.config, network.adapters, config.model.dtype)}")
    job = loop.Job(
        train_step=built.train_step,
        evaluate=functools.partial(evaluation.evaluate, built.eval_step, data.held_out, built.batch_shardings),
        shardings=built.batch_shardings,
        num_steps=num_steps,
        config=config.run,
        meta={"fingerprint": fingerprint(config, data.loader, num_steps, described), "config": flags.as_dict(kept)},
        flops=functools.partial(step_flops, network),
        measure=functools.partial(devices.memory, chosen),
    )
    # Another mesh or another time to evaluate in one process would leave the others waiting for it.
    alike = {**flags.as_dict(kept), **job.meta["fingerprint"], "JAX": jax.__version__}
    processes.require_equal("what is trained", alike)
    start = processes.share(lambda: checkpoint.newest(output_dir) or 0)
    if not start:  # before anything is written, as this may fail
        if config.run.resume != "never":
            say(f"resume      {output_dir} has no checkpoint yet: from the start")
        if note := disk.require_room(output_dir, built.abstract_state(), config.run.keep_checkpoints):
            say(note)
        params, source = initial_params(config, sources, network, base, mesh)
        say(f"weights     {source}")
        state = built.init_state(params)
        del params  # donated with the state to the first step
    with contextlib.ExitStack() as stack, processes.guard():
        if processes.first:
            stack.enter_context(run_directory.locked(output_dir, config.run.resume))
        if processes.share(lambda: checkpoint.newest(output_dir) or 0) != start:
            raise UserError(f"--output_dir={output_dir}: another process has just trained there; start again")
        asked = stack.enter_context(loop.StopSignal().installed())
        stop = StopVote(asked, chosen, processes.count)
        checkpoints = stack.enter_context(
            contextlib.closing(
                checkpoint.Checkpoints(output_dir, config.run.keep_checkpoints, config.run.keep_best, processes)
            )
        )
        batches = stack.enter_context(contextlib.closing(data.loader.iterator()))
        evaluated = True
        if start:
            refuse = functools.partial(refuse_another_run, output_dir, current=job.meta["fingerprint"])
            restored = checkpoints.restore_newest(built.abstract_state(), refuse, say)
            state, start, evaluated = restored.state, restored.step, restored.meta["metrics"] is not None
            batches.set_state(restored.data)
            say(f"resume      {output_dir} after step {start:,}")
            del restored  # its state is donated to the next step
        log: Log = SilentLog()
        if processes.first:
            flags.write_config(kept, output_dir)
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
                described,
            )
            log = stack.enter_context(contextlib.closing(MetricLog(output_dir, start)))
        stream = sys.stdout if processes.first else io.StringIO()
        progress = Progress(stream, start, num_steps, config.run.log_every, peak_flops=peak_flops(config, chosen))
        stack.callback(progress.finish)
        outcome = loop.train(job, state, start, batches, checkpoints, log, progress, stop, evaluated)
    if outcome.stopped and stop.received is not None:
        flagfile = shlex.quote(str(output_dir / run_directory.FLAGS))
        say(f"stopped by {stop.received.name} after step {outcome.step:,}, which is saved")
        say(f"resume with: python -m cfprm_jax.train --flagfile={flagfile} --resume=auto")
        return 130 if stop.received == signal.SIGINT else config.run.preemption_exit_code
    say(f"done        {num_steps - start:,} steps in {duration(time.monotonic() - started)}")
    if sources.candidates:
        del state, outcome  # the optimizer's memory
        best_of_n(config, candidates, output_dir, mesh, say, processes.first)
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


def go_on_from_prm(config: TrainConfig, sources: Sources, say: Say) -> TrainConfig:
    """The options completed by what the directory of a PRM says, where that is what training begins with."""
    if sources.init == "random":
        return config
    adopted = origin.adopt(sources.model, config.model, config.encoding, config.given)
    for line in adopted.lines:
        say(f"goes on     {line}")
    return dataclasses.replace(config, model=adopted.model, encoding=adopted.encoding)


def open_network(config: TrainConfig, sources: Sources, mesh: Mesh) -> Network:
    """Shapes and shardings, before any weight is read. UserError for a mesh that does not divide them."""
    backbone, raw = hf.read_config(sources.model)
    backbone.refuse_length(config.encoding.max_length)
    model = config.model
    attention = sharding.attention_backend(model.attention, mesh, backbone, model.dtype)
    network = PRMConfig(backbone, model.head, model.dtype, attention, model.remat)
    own = lora.parse(config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_targets)
    if own is not None and sources.init == "random":
        raise UserError("--lora_rank needs a backbone with weights of its own; no checkpoint would hold random ones")
    return Network(network, raw, sharding.param_shardings(mesh, parameters.param_specs(network)), own)


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
        for number, candidate in enumerate(question.candidates):
            if candidate.correct is None:
                raise UserError(
                    f'{question.source}: candidate {number} has no "correct"; score the candidates after training, and '
                    "let bon grade them"
                )
    return questions


def step_flops(network: Network, batch: Batch) -> float:
    """What the network needs for a training step on a batch."""
    pairs = flops.visible_pairs(batch.packed, batch.tokens_computed)
    return flops.train_flops(network.config, batch.tokens_computed, pairs, frozen=network.adapters is not None)


def peak_flops(config: TrainConfig, chosen: Sequence[jax.Device]) -> float | None:
    """What all devices can do in a second; None where that is not known, or a run does not compute in bfloat16."""
    peak = flops.peak_flops(chosen[0].device_kind)
    return None if peak is None or config.model.dtype != "bfloat16" else peak * len(chosen)


def best_of_n(
    config: TrainConfig, questions: list[Question], output_dir: pathlib.Path, mesh: Mesh, say: Say, writes: bool
) -> None:
    """Score the candidates with the newest checkpoint, as score would, and write and show what bon makes of them."""
    loaded = load_inference.open_prm(output_dir, config.model.dtype, config.model.attention, mesh)
    scored = list(scored_questions(questions, Scorer(loaded, mesh=mesh)))
    if not writes:
        return
    directory = output_dir / "best_of_n"
    choice = bon.BonConfig(
        input=(config.eval.bon_candidates,), n=config.eval.bon_n, grader="none", output_dir=str(directory)
    )
    result = bon.evaluate(scored, choice)
    flags.write_config(choice, directory)
    bon.write(result, directory)
    say(f"\n{result.summary}\nreport      {directory / 'report.html'}")


def initial_params(
    config: TrainConfig, sources: Sources, network: Network, base: adapters.Base | None, mesh: Mesh
) -> tuple[Any, str]:
    """The float32 parameters that are trained, in their shardings, and a phrase that says where they come from."""
    key = jax.random.key(config.run.seed)
    if base is not None and network.adapters is not None:
        return base.initial_params(network.config, network.adapters, key, mesh), base.report
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


def fingerprint(
    config: TrainConfig, loader: Loader, num_steps: int, lora_record: dict[str, Any] | None
) -> dict[str, Any]:
    """What must be the same for a run to go on: the data, and the options that the result depends on."""
    options = flags.as_dict(config.model) | flags.as_dict(config.loss) | flags.as_dict(config.optimizer)
    # Where and in how many parts a step is computed changes rounding at most.
    for name in ("attention", "remat", "accumulation"):
        del options[name]
    if lora_record is not None:
        options |= {**flags.as_dict(config.lora), "weights of the backbone": lora_record["backbone_fingerprint"]}
    return {**loader.fingerprint, **options, "steps of the run": num_steps}


def refuse_another_run(output_dir: pathlib.Path, meta: dict[str, Any], current: dict[str, Any]) -> None:
    """UserError naming every option that a resumed run has changed."""
    changed = difference(meta["fingerprint"], current)
    if changed:
        raise UserError(
            f"--resume: {output_dir} was trained with other data or options: {changed}. Its own are in "
            f"{output_dir / run_directory.FLAGS}: --flagfile={output_dir / run_directory.FLAGS} --resume=auto"
        )


if __name__ == "__main__":
    sys.exit(flags.run(TrainConfig, main))
