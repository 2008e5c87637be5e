"""The peak before the first step, as the real compiler plans it, for a network of a few million parameters."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from cfprm_jax.config import DeviceConfig, FrozenConfig, LoraConfig, ModelConfig, OptimizerConfig
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import ahead
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.planning.start import compile_start
from cfprm_jax.run.options import TrainConfig

NET = BackboneConfig(512, 256, 1024, 8, 4, 2, 64)
MODEL = ModelConfig(dtype="bfloat16", remat="layer")
COMPACT = OptimizerConfig(optimizer="adamw_compact")
STEP = ahead.PlannedStep(
    TrainConfig(model=MODEL, optimizer=COMPACT, device=DeviceConfig(mesh="data=1")), NET, 1, 1, 128
)
H100 = ACCELERATORS["h100-80gb"]
LAYER = 4 * 256 * 1024  # the largest matrix, in float32

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_compact"])
@pytest.mark.parametrize(("mesh", "devices"), [("data=1", 1), ("fsdp=4", 4)])
def test_loading_needs_the_state_and_two_layers(optimizer: str, mesh: str, devices: int) -> None:
    config = dataclasses.replace(
        STEP.config, device=DeviceConfig(mesh=mesh), optimizer=OptimizerConfig(optimizer=optimizer)
    )
    planned = dataclasses.replace(STEP, config=config, num_devices=devices)
    start = compile_start(planned, H100)
    assert start.what.startswith("loading backbone.layers.mlp.")
    state = ahead.bytes_on_a_device(ahead.build_for(planned, H100).abstract_state())
    assert 0.99 * state < start.total < state + 2.2 * LAYER / devices + 1e5


def test_random_initialisation_is_one_program() -> None:
    config = dataclasses.replace(STEP.config, model=dataclasses.replace(MODEL, init="random"))
    start = compile_start(dataclasses.replace(STEP, config=config), H100)
    assert start.what == "random initialisation"
    # No float32 masters of everything beside the state, only of a parameter or two.
    state = ahead.bytes_on_a_device(ahead.build_for(STEP, H100).abstract_state())
    assert state < start.total < state + 2.5 * 8 * LAYER


def test_adapters_beside_frozen_weights() -> None:
    """Float32 adapters with two moments, and the backbone in bfloat16."""
    rank, trained, layers = 128, 2, 8
    config = dataclasses.replace(
        STEP.config,
        optimizer=OptimizerConfig(),
        lora=LoraConfig(lora_rank=rank, lora_targets=("query", "down")),
        frozen=FrozenConfig(frozen_layers=layers - trained),
    )
    planned = dataclasses.replace(STEP, config=config)
    adapters = 4 * trained * rank * (256 + 256 + 1024 + 256)
    assert ahead.bytes_on_a_device(ahead.build_for(planned, H100).abstract_state()) == 3 * (adapters + 4 * 257) + 4
    matrices = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 1024
    vectors = 2 * 256 + 256 + 2 * 128
    frozen = 2 * (512 * 256 + layers * (matrices + vectors) + 256)
    assert ahead.bytes_on_a_device(ahead.build_for(planned, H100).frozen) == frozen
    start = compile_start(planned, H100)
    assert start.what == "making adapters"
    assert start.total == frozen + 4 * adapters  # fresh ones stand beside the state that they become
