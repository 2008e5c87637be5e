"""python -m cfprm_jax.plan: does a training configuration fit an accelerator? Compiled for it, on any machine."""

from __future__ import annotations

import os

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported: an accelerator that is here has nothing to do

import dataclasses
import pathlib
import sys
from typing import Any

from cfprm_jax import flags
from cfprm_jax.config import Options, option
from cfprm_jax.data import row_shapes
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import ahead, remedies, shapes, start
from cfprm_jax.planning.accelerators import ACCELERATORS, GIB, usable
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import atomic, config_files, output_paths
from cfprm_jax.runtime.regular_files import check_output
from cfprm_jax.training import flops

# One after another, 32 solutions of PRM800K phase 1 fill 6 to 11 rows of 2,048; in trees of shared prefixes, fewer.
_SHARE_OF_LONGEST = 3
# What launch/ sets for the compiler, and plan takes as well.
_COMPILER_ENVIRONMENT = ("JAX_OPTIMIZATION_LEVEL", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class PlanOptions(Options):
    """What the plan is for."""

    accelerator: str = option("h100-80gb", "Device that the step is compiled for.", choices=tuple(ACCELERATORS))
    num_devices: int = option(1, "How many of them; a v5p-8 has 4 chips.", lower=1, upper=4096)
    rows: int = option(
        0,
        "Rows of a batch over all devices. 0 is, for packed rows, as many of the longest that a run may use as hold "
        "--batch_size solutions of a third of --max_length, or --batch_tokens; else --batch_size.",
        lower=0,
        upper=1 << 16,
    )
    hbm_reserve: float = option(
        -1.0,
        "GiB of a device that are not the step's; -1 is 4 for a GPU (CUDA, cuDNN, NCCL) and 0.25 for a TPU.",
        lower=0.0,
        upper=1000.0,
        also=-1.0,
    )
    model_config: str = option(
        "", "config.json of the backbone, where --model names no directory here and no published model."
    )
    suggest: int = option(2, "Most changes that would make it fit, each compiled as well.", lower=0, upper=100)
    output: str = option("", "JSON file for the figures.")


@dataclasses.dataclass(frozen=True)
class PlanConfig(Options):
    """Compile the train step for an accelerator that need not be here, and say whether it fits.

    python -m cfprm_jax.plan --flagfile=configs/paper/math_q_ranking_c2.flags --accelerator=h100-80gb --num_devices=1

    Takes every flag of train but --lora_rank; no weights and no data are read. Memory, kernels and collectives are the
    XLA compiler's own figures. Exits with 0 if it fits and with 1 if it does not, naming changes that would.
    """

    plan: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)


def main(config: PlanConfig) -> int:
    """The command."""
    if config.plan.output:
        output_paths.require_directory(f"--output={config.plan.output}", pathlib.Path(config.plan.output).parent)
        check_output(config.plan.output, "--output")
    accelerator = ACCELERATORS[config.plan.accelerator]
    job = make_job(config)
    limit = usable(accelerator, config.plan.hbm_reserve)
    print(f"model       {describe_backbone(job.backbone)}, {job.head} head", flush=True)
    print(
        f"step        {job.rows} rows of {job.length} tokens, --optimizer={job.optimizer.optimizer} "
        f"--accumulation={job.optimizer.accumulation} --remat={job.remat} --dtype={job.dtype}"
    )
    print(f"rows        {describe_rows(config, job)}")
    print(f"compiling   for {config.plan.num_devices} x {accelerator.name}", flush=True)
    compiled = ahead.compile_step(job, accelerator)
    begun = start.compile_start(job, accelerator)
    fits = not compiled.refused and max(compiled.memory.total, begun.total) <= limit
    for line in report(job, compiled, begun, limit):
        print(line)
    found: list[remedies.Remedy] = []
    if not fits and config.plan.suggest:
        found = remedies.find(job, accelerator, limit, config.plan.suggest, lambda text: print(text, flush=True))
        for remedy in found:
            rows = "" if remedy.rows == job.rows else f" in {remedy.rows} rows"
            print(f"would fit   {' '.join(remedy.flags)}: {_gib(remedy.total)}{rows}")
        if not found:
            print("would fit   nothing that was tried: choose another accelerator, or shorter rows")
    if config.plan.output:
        figures = {"fits": fits, **as_json(config, job, compiled, begun, limit, found)}
        atomic.write_json(config.plan.output, figures)
    return 0 if fits else 1


def make_job(config: PlanConfig) -> ahead.Job:
    """What train would compile.

    Raises:
      UserError: the model's shape is not known, it does not take rows of that length, or adapters are to be trained.
    """
    plan, train = config.plan, config.train
    if train.lora.lora_rank:
        raise UserError(f"--lora_rank={train.lora.lora_rank}: plan compiles the training of all weights only")
    backbone = find_backbone(train.model.model, plan.model_config)
    backbone.refuse_length(train.encoding.max_length)
    packing, accumulation = train.packing, train.optimizer.accumulation
    length = packing.row_length or row_shapes.row_lengths(packing, train.encoding.max_length)[-1]
    solutions = batch_solutions(train)
    rows = plan.rows or solutions
    if not plan.rows and packing.packing != "none":
        tokens = packing.batch_tokens or -(-packing.batch_size * train.encoding.max_length // _SHARE_OF_LONGEST)
        rows = -(-tokens // length)
    return ahead.Job(
        backbone=backbone,
        head=train.model.head,
        dtype=train.model.dtype,
        attention=train.model.attention,
        remat=train.model.remat,
        loss=train.loss,
        optimizer=train.optimizer,
        mesh=train.device.mesh,
        num_devices=plan.num_devices,
        rows=ahead.round_rows(rows, train.device.mesh, plan.num_devices, accumulation),
        length=length,
        trajectories=solutions,
        batch_tokens=packing.batch_tokens,
        init=train.model.init,
        deterministic=train.model.deterministic,
    )


def batch_solutions(train: TrainConfig) -> int:
    """Solutions of a batch: --batch_size, or as many of a third of --max_length as have --batch_tokens."""
    tokens, each = train.packing.batch_tokens, train.encoding.max_length / _SHARE_OF_LONGEST
    return max(round(tokens / each), 1) if tokens else train.packing.batch_size


def find_backbone(model: str, model_config: str) -> BackboneConfig:
    """The shape that --model_config, the directory --model or its name describes, in this order.

    Raises:
      UserError: none of them does.
    """
    if model_config:
        try:
            return BackboneConfig.from_hf(read_object(pathlib.Path(model_config)))
        except UserError as error:
            raise UserError(f"--model_config={model_config}: {str(error).removeprefix(f'{model_config}: ')}") from error
    if (pathlib.Path(model) / "config.json").is_file():
        return loading.read_config(model)[0]
    backbone = shapes.known_backbone(model)
    if backbone is None:
        raise UserError(
            f"--model={model} is no directory with a config.json here, nor the name of a published Qwen2.5, "
            "Qwen3, Llama 3 or Mistral 7B; give the shape by --model_config=FILE"
        )
    return backbone


def describe_rows(config: PlanConfig, job: ahead.Job) -> str:
    """Which shape is planned, for what reason, and which others a run may use."""
    packing, longest = config.train.packing, config.train.encoding.max_length
    most = ahead.round_rows(batch_solutions(config.train), job.mesh, job.num_devices, job.optimizer.accumulation)
    size = f"--batch_tokens={packing.batch_tokens}" if packing.batch_tokens else f"--batch_size={packing.batch_size}"
    if packing.packing == "none":
        assumed = f"one for each of {size} solutions"
        if packing.batch_tokens:
            assumed = f"one for each of {batch_solutions(config.train)} solutions of {size}"
    elif config.plan.rows:
        assumed = "as --rows says"
    elif packing.batch_tokens:
        assumed = f"for {size}"
    else:
        assumed = (
            f"for --batch_size={packing.batch_size} solutions that fill {longest // _SHARE_OF_LONGEST} tokens each"
        )
    text = f"{assumed}, of the longest that --packing={packing.packing} makes"
    if packing.row_length:
        text = f"{assumed}, of --row_length"
    if job.rows < most:
        text += (
            "; a run's shapes follow its data, and train prints them: --rows and --row_length plan others, "
            f"up to {most} x {job.length} for nothing but the longest solutions"
        )
    return text


def describe_backbone(net: BackboneConfig) -> str:
    """Its shape in a line."""
    return (
        f"{net.num_hidden_layers} layers, width {net.hidden_size}, mlp {net.intermediate_size}, "
        f"{net.num_attention_heads} heads over {net.num_key_value_heads}, vocabulary {net.vocab_size:,}"
    )


def report(job: ahead.Job, compiled: ahead.Compiled, begun: start.Start, limit: int) -> list[str]:
    """The figures as lines."""
    memory = compiled.memory
    mesh = ", ".join(f"{axis}={size}" for axis, size in compiled.mesh.items())
    lines = [f"devices     {job.num_devices} x {compiled.device_kind}, mesh {mesh}; {compiled.parameters:,} parameters"]
    if compiled.refused:
        lines.append(f"refused     {compiled.refused}")
    else:
        lines.append(f"compiled    in {sum(compiled.seconds):.1f} s")
        kernels = ", ".join(f"{name} x {times}" for name, times in compiled.attention_kernels.items())
        lines.append(f"attention   {compiled.attention}: {kernels or 'no kernel, plain XLA'}")
        lines.append(f"in place    {compiled.aliased} of {compiled.donated} arrays of the state")
        for kind, what in compiled.collectives.items():
            lines.append(f"collective  {kind}: {what.bytes / 1e9:.3f} GB a step in {what.count} calls")
        if not compiled.collectives:
            lines.append("collective  none")
    peak = flops.peak_flops(compiled.device_kind)
    ideal = compiled.model_flops / job.num_devices / peak if peak else None
    ideally = f", {ideal:.3f} s a step at a device's peak of {peak / 1e12:,.0f} TFLOP/s" if peak and ideal else ""
    lines.append(
        f"arithmetic  {compiled.model_flops:.3e} FLOPs a step, "
        f"{compiled.model_flops / compiled.tokens / 1e9:.2f} GFLOPs a token of full causal rows{ideally}"
    )
    names = ("parameters", "optimizer", "gradients", "activations", "temporaries", "batch")
    lines.append(f"memory      a device: {', '.join(f'{name} {_gib(getattr(memory, name))}' for name in names)}")
    lines.append(f"start       {_gib(begun.total)} at the most before the first step, {begun.what}")
    total, where = memory.total, ""
    if begun.total > total:
        total, where = begun.total, f", at the start ({begun.what})"
    verdict = "fits" if not compiled.refused and total <= limit else "too large"
    lines.append(f"{verdict:<12}{_gib(total)} of {_gib(limit)} usable on each device{where}")
    return lines


def as_json(
    config: PlanConfig,
    job: ahead.Job,
    compiled: ahead.Compiled,
    begun: start.Start,
    limit: int,
    found: list[remedies.Remedy],
) -> dict[str, Any]:
    """Everything for a program."""
    return {
        "accelerator": config.plan.accelerator,
        "num_devices": job.num_devices,
        "rows": job.rows,
        "row_length": job.length,
        "usable_bytes": limit,
        **dataclasses.asdict(compiled),
        "start": dataclasses.asdict(begun),
        "environment": {name: os.environ[name] for name in _COMPILER_ENVIRONMENT if name in os.environ},
        "flops_per_token": compiled.model_flops / compiled.tokens,
        "would_fit": [dataclasses.asdict(remedy) for remedy in found],
        "config": config_files.as_dict(config),
    }


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


if __name__ == "__main__":
    sys.exit(flags.run(PlanConfig, main))
