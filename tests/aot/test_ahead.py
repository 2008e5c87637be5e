"""The paper's models compiled for accelerators that are not here: what XLA plans in memory, kernels and collectives.

Nothing runs. The compilers are the real ones, so what does not fit or cannot be lowered fails here as it would there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from cfprm_jax.config import DeviceConfig, ModelConfig, OptimizerConfig
from cfprm_jax.planning import ahead, start
from cfprm_jax.planning.accelerators import ACCELERATORS, GIB, usable
from cfprm_jax.planning.shapes import known_backbone
from cfprm_jax.run.options import TrainConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _missing(*plugins: str) -> bool:
    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return not any(map(found, plugins))


gpu = pytest.mark.skipif(
    _missing("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"),
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)
tpu = pytest.mark.skipif(_missing("libtpu"), reason="no XLA compiler for TPUs: pip install '.[aot]'")


def planned_step(num_devices: int, model: str, mesh: str, rows: int, optimizer: str = "adamw") -> ahead.PlannedStep:
    """A model at length 2,048, bfloat16 compute, layers recomputed."""
    backbone = known_backbone(model)
    assert backbone is not None
    config = TrainConfig(
        model=ModelConfig(dtype="bfloat16", remat="layer"),
        optimizer=OptimizerConfig(optimizer=optimizer),
        device=DeviceConfig(mesh=mesh),
    )
    return ahead.PlannedStep(config, backbone, num_devices, rows, length=2048)


def compile_for(accelerator: str, num_devices: int, model: str, mesh: str, rows: int, optimizer: str = "adamw"):
    """The step of a model, with the mask of prefix trees."""
    planned = planned_step(num_devices, model, mesh, rows, optimizer)
    compiled = ahead.compile_step(planned, ACCELERATORS[accelerator])
    memory = compiled.memory
    print(
        f"{model} on {num_devices} x {accelerator}, {mesh}, {rows} rows, {optimizer}: {memory.total / GIB:.2f} GiB, "
        f"compiled in {sum(compiled.seconds):.0f} s"
    )
    assert not compiled.refused
    assert memory.total <= usable(ACCELERATORS[accelerator], -1)
    assert compiled.aliased == compiled.donated > 0
    assert memory.activations > 0 and memory.temporaries > 0
    return compiled, planned.backbone.num_hidden_layers


def check_cudnn(compiled: ahead.Compiled, layers: int) -> None:
    """Flash attention forwards, again in the recomputation, and backwards, in every layer."""
    assert compiled.attention == "cudnn"
    backward = {name: n for name, n in compiled.attention_kernels.items() if "Backward" in name}
    assert sum(backward.values()) == layers
    assert sum(compiled.attention_kernels.values()) == 3 * layers


def check_pallas(compiled: ahead.Compiled, layers: int) -> None:
    """A forward kernel, run twice, and backward kernels, in every layer."""
    assert compiled.attention == "pallas"
    forward = sum(n for name, n in compiled.attention_kernels.items() if "forward" in name)
    backward = {n for name, n in compiled.attention_kernels.items() if "backward" in name}
    assert (forward, backward) == (2 * layers, {layers})


def gathers_weights(compiled: ahead.Compiled) -> bool:
    """Whether every layer's weights are gathered in bfloat16, forwards and in the recomputation, and hardly more is."""
    weights = 2 * 2 * (compiled.parameters - 152064 * 3584)
    return 0.9 * weights < compiled.collectives["all-gather"].bytes < 1.2 * weights


@gpu
def test_7b_on_one_h100_under_64_gib() -> None:
    compiled, layers = compile_for("h100-80gb", 1, "Qwen2.5-Math-7B", "data=1", 8, "adamw_compact")
    assert compiled.parameters == 7_070_622_721
    assert compiled.memory.total < 64 * GIB
    assert not compiled.collectives
    assert compiled.memory.activations == 28 * 8 * 2048 * 3584 * 2  # each layer's input in bfloat16
    check_cudnn(compiled, layers)


@gpu
def test_the_state_of_7b_is_made_without_float32_masters_beside_it() -> None:
    """With them it would be 66 GiB; the step needs more than the start in any case."""
    planned = planned_step(1, "Qwen2.5-Math-7B", "data=1", 8, "adamw_compact")
    begun = start.compile_start(planned, ACCELERATORS["h100-80gb"])
    print(f"start: {begun.total / GIB:.2f} GiB, {begun.what}")
    state = ahead.bytes_on_a_device(ahead.build_for(planned, ACCELERATORS["h100-80gb"]).abstract_state())
    largest_layer = 4 * 3584 * 18944
    assert begun.total < state + 2.2 * largest_layer
    assert begun.total < 41 * GIB


@gpu
@pytest.mark.parametrize(
    ("devices", "options", "most"),
    [
        pytest.param(1, ["--mesh=data=1", "--rows=8", "--optimizer=adamw_compact"], 64, marks=pytest.mark.slow),
        (8, ["--mesh=data=1,fsdp=8", "--rows=32"], 24),
    ],
)
def test_as_launch_sets_the_environment(devices: int, options: list[str], most: float, tmp_path: pathlib.Path) -> None:
    """XLA's effort level and combined collectives, which are read when JAX starts."""
    output = tmp_path / "plan.json"
    command = [sys.executable, "-m", "cfprm_jax.plan", "--model=Qwen2.5-Math-7B", f"--num_devices={devices}"]
    command += [*options, "--row_length=2048", "--suggest=0", f"--output={output}"]
    source = f". launch/gpu_environment.sh && exec {shlex.join(command)}"
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        ["bash", "-c", source], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    print(done.stdout)
    figures = json.loads(output.read_text())
    assert figures["environment"]["JAX_OPTIMIZATION_LEVEL"] == "O1"
    assert "combine_threshold" in figures["environment"]["XLA_FLAGS"]
    assert figures["memory"]["total"] < most * GIB
    assert figures["aliased"] == figures["donated"]
    backward = sum(n for name, n in figures["attention_kernels"].items() if "Backward" in name)
    assert backward == 28


@gpu
def test_7b_on_eight_h100_with_fsdp() -> None:
    compiled, layers = compile_for("h100-80gb", 8, "Qwen2.5-Math-7B", "data=1,fsdp=8", 32)
    assert compiled.memory.total < 20 * GIB
    assert gathers_weights(compiled)
    assert compiled.collectives["all-reduce"].bytes < 0.01 * compiled.collectives["reduce-scatter"].bytes
    check_cudnn(compiled, layers)


@pytest.mark.slow
@gpu
def test_7b_on_eight_h100_with_tensor_2() -> None:
    compiled, layers = compile_for("h100-80gb", 8, "Qwen2.5-Math-7B", "data=1,fsdp=4,tensor=2", 32)
    assert compiled.memory.total < 24 * GIB
    check_cudnn(compiled, layers)


@pytest.mark.slow
@gpu
def test_14b_on_eight_h100() -> None:
    compiled, layers = compile_for("h100-80gb", 8, "Qwen2.5-14B", "data=1,fsdp=8", 32)
    check_cudnn(compiled, layers)


@pytest.mark.slow
@gpu
def test_72b_on_sixty_four_h100() -> None:
    compiled, layers = compile_for("h100-80gb", 64, "Qwen2.5-72B", "data=1,fsdp=64", 64)
    assert compiled.parameters > 71e9
    check_cudnn(compiled, layers)


@pytest.mark.slow
@gpu
def test_7b_on_one_a100() -> None:
    compiled, layers = compile_for("a100-80gb", 1, "Qwen2.5-Math-7B", "data=1", 8, "adamw_compact")
    assert compiled.memory.total < 64 * GIB
    check_cudnn(compiled, layers)


@tpu
def test_7b_on_v5e_16() -> None:
    compiled, layers = compile_for("v5e", 16, "Qwen2.5-Math-7B", "data=1,fsdp=16", 32)
    check_pallas(compiled, layers)


@pytest.mark.slow
@tpu
def test_7b_on_v5p_8() -> None:
    compiled, layers = compile_for("v5p", 4, "Qwen2.5-Math-7B", "data=1,fsdp=4", 32)
    check_pallas(compiled, layers)


@pytest.mark.slow
@tpu
def test_7b_on_v6e_8() -> None:
    compiled, layers = compile_for("v6e", 8, "Qwen2.5-Math-7B", "data=1,fsdp=8", 32)
    check_pallas(compiled, layers)
