"""Every change of flags that plan suggests, compiled: train would take it, and it saves memory."""

from __future__ import annotations

import importlib.util

import pytest

from cfprm_jax.config import DeviceConfig, ModelConfig
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import ahead, remedies, start
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.run.options import TrainConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)
H100 = ACCELERATORS["h100-80gb"]
# Rows that neither two devices nor two parts divide, where nothing is saved yet.
STEP = ahead.PlannedStep(
    TrainConfig(model=ModelConfig(dtype="bfloat16", remat="none"), device=DeviceConfig(mesh="data=2")),
    backbone=BackboneConfig(4096, 512, 2048, 4, 8, 2, 64),
    num_devices=2,
    rows=6,
    length=1024,
)


@pytest.fixture(scope="module")
def before() -> int:
    return ahead.compile_step(STEP, H100).memory.total


@pytest.mark.parametrize("last", ["remat", "mesh", "optimizer", "accumulation", "batch_size", "num_devices"])
def test_each_kind_of_change(last: str, before: int) -> None:
    """The first trial that it is the last change of."""
    trial = next(c for c in remedies.trials(STEP, H100) if list(c.changes)[-1] == last)
    compiled = ahead.compile_step(trial.planned, H100)
    assert not compiled.refused and compiled.aliased == compiled.donated
    assert compiled.tokens == trial.planned.rows * 1024
    assert compiled.memory.total < before
    print(f"{' '.join(trial.flags)}: {trial.planned.rows} rows, {compiled.memory.total:,} bytes instead of {before:,}")


def test_what_is_found_fits(before: int) -> None:
    found = remedies.find(STEP, H100, before - 1, 2, compiled=ahead.compile_step, started=start.compile_start)
    assert [remedy.flags for remedy in found] == [("--remat=layer",), (f"--mesh={remedies.SHARDED}",)]
    assert all(remedy.total < before for remedy in found)
