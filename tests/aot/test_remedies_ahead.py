"""Every change of flags that plan suggests, compiled: train would take it, and it saves memory."""

from __future__ import annotations

import importlib.util

import pytest

from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import ahead, remedies
from cfprm_jax.planning.accelerators import ACCELERATORS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)
H100 = ACCELERATORS["h100-80gb"]
# Rows that neither two devices nor two parts divide, where nothing is saved yet.
JOB = ahead.Job(
    backbone=BackboneConfig(4096, 512, 2048, 4, 8, 2, 64),
    head="linear",
    dtype="bfloat16",
    attention="auto",
    remat="none",
    loss=LossConfig(),
    optimizer=OptimizerConfig(),
    mesh="data=2",
    num_devices=2,
    rows=6,
    length=1024,
)


@pytest.fixture(scope="module")
def before() -> int:
    return ahead.compile_step(JOB, H100).memory.total


@pytest.mark.parametrize("last", ["remat", "mesh", "optimizer", "accumulation", "batch_size", "num_devices"])
def test_each_kind_of_change(last: str, before: int) -> None:
    """The first candidate that it is the last change of."""
    candidate = next(c for c in remedies.candidates(JOB, H100) if list(c.changes)[-1] == last)
    compiled = ahead.compile_step(candidate.job, H100)
    assert not compiled.refused and compiled.aliased == compiled.donated
    assert compiled.tokens == candidate.job.rows * 1024
    assert compiled.memory.total < before
    print(
        f"{' '.join(candidate.flags)}: {candidate.job.rows} rows, {compiled.memory.total:,} bytes instead of {before:,}"
    )


def test_what_is_found_fits(before: int) -> None:
    found = remedies.find(JOB, H100, before - 1, 2)
    assert [remedy.flags for remedy in found] == [("--remat=layer",), (f"--mesh={remedies.SHARDED}",)]
    assert all(remedy.total < before for remedy in found)
