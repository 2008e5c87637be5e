"""Whether a planned step fits its accelerator: compiled, compared with the usable memory, and reported."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import ahead, remedies, request, start
from cfprm_jax.planning.accelerators import ACCELERATORS, GIB, usable
from cfprm_jax.planning.options import PlanConfig
from cfprm_jax.runtime import config_files
from cfprm_jax.runtime.progress import counted
from cfprm_jax.training import flops

# Compiler settings that launch/ exports and a plan uses too.
_COMPILER_ENVIRONMENT = ("JAX_OPTIMIZATION_LEVEL", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's figures of a step and of the start before it, and the memory that they may take.

    Attributes:
      limit: usable bytes on each device.
      remedies: changes of flags that fit, where the step does not.
    """

    config: PlanConfig
    planned: ahead.PlannedStep
    compiled: ahead.Compiled
    start: start.Start
    limit: int
    remedies: tuple[remedies.Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether step and start stay within the limit."""
        return not self.compiled.refused and max(self.compiled.memory.total, self.start.total) <= self.limit


def plan(config: PlanConfig, log: Callable[[str], None]) -> Verdict:
    """Compile the step of a configuration for its accelerator, and log the figures and the verdict.

    Raises:
      UserError: the options do not describe a step that train would compile, or no compiler is installed.
    """
    accelerator = ACCELERATORS[config.plan.accelerator]
    planned = request.planned_step(config)
    options = config.train
    layers = options.frozen.frozen_layers
    cached = " and cached" if options.frozen.cached else ""
    frozen = f", the first {counted(layers, 'layer')} frozen{cached}" if layers else ""
    adapters = f", adapters of rank {options.lora.lora_rank}" if options.lora.lora_rank else ""
    log(f"model       {describe_backbone(planned.backbone)}, {options.model.head} head{frozen}{adapters}")
    log(
        f"step        {counted(planned.rows, 'row')} of {planned.length:,} tokens, "
        f"--optimizer={options.optimizer.optimizer} --accumulation={options.optimizer.accumulation} "
        f"--remat={options.model.remat} --dtype={options.model.dtype}"
    )
    log(f"rows        {request.describe_rows(config, planned)}")
    log(f"compiling   for {config.plan.num_devices} x {accelerator.name}")
    limit = usable(accelerator, config.plan.hbm_reserve)
    compiled = ahead.compile_step(planned, accelerator)
    verdict = Verdict(config, planned, compiled, start.compile_start(planned, accelerator), limit)
    for line in lines(verdict):
        log(line)
    if verdict.fits or not config.plan.suggest:
        return verdict
    found = remedies.find(
        planned,
        accelerator,
        limit,
        config.plan.suggest,
        compiled=ahead.compile_step,
        started=start.compile_start,
        log=log,
    )
    for remedy in found:
        rows = "" if remedy.rows == planned.rows else f" in {remedy.rows} rows"
        log(f"would fit   {' '.join(remedy.flags)}: {_gib(remedy.total)}{rows}")
    if not found:
        log("would fit   nothing that was tried: choose another accelerator, or shorter rows")
    return dataclasses.replace(verdict, remedies=tuple(found))


def describe_backbone(net: BackboneConfig) -> str:
    """Its shape in a line."""
    return (
        f"{net.num_hidden_layers} layers, width {net.hidden_size}, mlp {net.intermediate_size}, "
        f"{net.num_attention_heads} heads over {net.num_key_value_heads}, vocabulary {net.vocab_size:,}"
    )


def lines(verdict: Verdict) -> list[str]:
    """The figures as lines of the log; the last is the verdict."""
    compiled, num_devices = verdict.compiled, verdict.planned.num_devices
    memory = compiled.memory
    mesh = ", ".join(f"{axis}={size}" for axis, size in compiled.mesh.items())
    out = [f"devices     {num_devices} x {compiled.device_kind}, mesh {mesh}; {compiled.parameters:,} parameters"]
    if 0 < compiled.trained != compiled.parameters:
        out[0] += f", {compiled.trained:,} trained"
    if compiled.refused:
        out.append(f"refused     {compiled.refused}")
    else:
        out.append(f"compiled    in {sum(compiled.seconds):.1f} s")
        kernels = ", ".join(f"{name} x {times}" for name, times in compiled.attention_kernels.items())
        out.append(f"attention   {compiled.attention}: {kernels or 'no kernel, plain XLA'}")
        out.append(f"in place    {compiled.aliased} of {compiled.donated} arrays of the state")
        for kind, collective in compiled.collectives.items():
            out.append(f"collective  {kind}: {collective.bytes / 1e9:.3f} GB a step in {collective.count} calls")
        if not compiled.collectives:
            out.append("collective  none")
    peak = flops.peak_flops(compiled.device_kind)
    ideal = compiled.model_flops / num_devices / peak if peak else None
    ideally = f", {ideal:.3f} s a step at a device's peak of {peak / 1e12:,.0f} TFLOP/s" if peak and ideal else ""
    out.append(
        f"arithmetic  {compiled.model_flops:.3e} FLOPs a step, "
        f"{compiled.model_flops / compiled.tokens / 1e9:.2f} GFLOPs a token of full causal rows{ideally}"
    )
    names = ["parameters", "optimizer", "gradients", "activations", "temporaries", "batch"]
    names += ["frozen"] if memory.frozen else []
    out.append(f"memory      a device: {', '.join(f'{name} {_gib(getattr(memory, name))}' for name in names)}")
    begun = verdict.start
    out.append(f"start       {_gib(begun.total)} at most before the first step, {begun.what}")
    total, where = memory.total, ""
    if begun.total > total:
        total, where = begun.total, f", at the start ({begun.what})"
    word = "fits" if verdict.fits else "too large"
    out.append(f"{word:<12}{_gib(total)} of {_gib(verdict.limit)} usable on each device{where}")
    return out


def as_json(verdict: Verdict) -> dict[str, Any]:
    """All figures, for --output."""
    compiled = verdict.compiled
    return {
        "fits": verdict.fits,
        "accelerator": verdict.config.plan.accelerator,
        "num_devices": verdict.planned.num_devices,
        "rows": verdict.planned.rows,
        "row_length": verdict.planned.length,
        "usable_bytes": verdict.limit,
        **dataclasses.asdict(compiled),
        "start": dataclasses.asdict(verdict.start),
        "environment": {name: os.environ[name] for name in _COMPILER_ENVIRONMENT if name in os.environ},
        "flops_per_token": compiled.model_flops / compiled.tokens,
        "would_fit": [dataclasses.asdict(remedy) for remedy in verdict.remedies],
        "config": config_files.as_dict(verdict.config),
    }


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
