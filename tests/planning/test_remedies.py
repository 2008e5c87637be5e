"""What is tried when a step does not fit, in which order, and what is said."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import Qwen2Config
from cfprm_jax.planning import remedies
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.planning.ahead import Job

GPU = ACCELERATORS["h100-80gb"]
NET = Qwen2Config(64, 16, 32, 2, 4, 2, 4)


def job(**changes) -> Job:
    base = Job(NET, "linear", "bfloat16", "auto", "layer", LossConfig(), OptimizerConfig(), "data=-1", 1, 8, 128)
    return dataclasses.replace(base, **changes)


def flags(one: Job, accelerator=GPU) -> list[str]:
    return [" ".join(f) for f, _ in remedies.candidates(one, accelerator)]


def test_on_one_card() -> None:
    assert flags(job())[:5] == [
        "--optimizer=adamw_compact",
        "--optimizer=adamw_compact --accumulation=2",
        "--optimizer=adamw_compact --accumulation=4",
        "--optimizer=adamw_compact --accumulation=8",
        "--mesh=data=1,fsdp=-1,tensor=1 --num_devices=2",
    ]


def test_on_several_the_weights_are_split_first() -> None:
    assert flags(job(num_devices=8))[:4] == [
        "--optimizer=adamw_compact",
        "--mesh=data=1,fsdp=-1,tensor=1",
        "--mesh=data=1,fsdp=-1,tensor=1 --optimizer=adamw_compact",
        "--mesh=data=1,fsdp=-1,tensor=1 --num_devices=16",
    ]


def test_float32_is_not_made_compact() -> None:
    assert not any("compact" in text for text in flags(job(dtype="float32")))
    assert flags(job(optimizer=OptimizerConfig(optimizer="adamw_compact", accumulation=8)))[0].endswith("=2")


def test_rows_stay_a_multiple_of_the_devices() -> None:
    rows = {j.num_devices: j.rows for _, j in remedies.candidates(job(rows=6), GPU)}
    assert rows[4] == 8 and rows[16] == 16


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and gradients of 100 bytes over the devices; half of it where it is compact."""

    def least(one: Job, accelerator) -> int:
        return 100 // one.num_devices // (2 if one.optimizer.optimizer == "adamw_compact" else 1)

    monkeypatch.setattr(remedies, "least_bytes", least)


def compiled(one: Job, accelerator):
    total = remedies.least_bytes(one, accelerator) + one.rows // one.num_devices
    return SimpleNamespace(memory=SimpleNamespace(total=total))


def test_only_what_can_fit_is_compiled(sizes) -> None:
    said: list[str] = []
    found = remedies.find(job(), GPU, 55, 2, said.append, compiled)
    # Compact alone is 50 + 8 rows; on two devices float32 is 50 + 4.
    assert [(r.flags[-1], r.total) for r in found] == [("--num_devices=2", 54), ("--num_devices=4", 27)]
    assert said[0] == "trying      --optimizer=adamw_compact"
    found = remedies.find(job(), GPU, 30, 2, lambda _: None, compiled)
    assert [(r.flags[-1], r.total) for r in found] == [("--num_devices=4", 27), ("--num_devices=8", 13)]


def test_what_the_model_does_not_allow_is_passed_over(sizes) -> None:
    def refuses(one: Job, accelerator):
        if one.num_devices < 8:
            raise UserError("--mesh: does not divide")
        return compiled(one, accelerator)

    found = remedies.find(job(), GPU, 30, 1, lambda _: None, refuses)
    assert [r.flags[-1] for r in found] == ["--num_devices=8"]
