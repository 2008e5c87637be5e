"""What is tried when a step does not fit, in which order, and what is said."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import remedies
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.planning.ahead import Job
from cfprm_jax.sharding.rules import parse_mesh

GPU = ACCELERATORS["h100-80gb"]
NET = BackboneConfig(64, 16, 32, 2, 4, 2, 4)


def job(**changes) -> Job:
    base = Job(NET, "linear", "bfloat16", "auto", "layer", LossConfig(), OptimizerConfig(), "data=-1", 1, 8, 128)
    return dataclasses.replace(base, **changes)


def flags(one: Job, accelerator=GPU) -> list[str]:
    return [" ".join(candidate.flags) for candidate in remedies.candidates(one, accelerator)]


def test_on_one_card() -> None:
    compact = "--optimizer=adamw_compact"
    assert flags(job())[:8] == [
        compact,
        f"{compact} --accumulation=2",
        f"{compact} --accumulation=4",
        f"{compact} --accumulation=8",
        f"{compact} --batch_size=16",
        f"{compact} --batch_size=8",
        f"{compact} --batch_size=4",
        "--mesh=data=1,fsdp=-1,tensor=1 --num_devices=2",
    ]


def test_what_is_recomputed_costs_least() -> None:
    found = flags(job(remat="mlp"))
    assert found[:3] == ["--remat=layer", "--optimizer=adamw_compact", "--remat=layer --optimizer=adamw_compact"]
    assert all(text.startswith("--remat=layer") for text in found if "accumulation" in text)


def test_on_several_the_weights_are_split_first() -> None:
    split, compact = "--mesh=data=1,fsdp=-1,tensor=1", "--optimizer=adamw_compact"
    assert flags(job(num_devices=8))[:4] == [split, compact, f"{split} {compact}", f"{split} --num_devices=16"]


def test_float32_is_not_made_compact() -> None:
    assert not any("compact" in text for text in flags(job(dtype="float32")))
    assert flags(job(optimizer=OptimizerConfig(optimizer="adamw_compact", accumulation=4)))[0] == "--accumulation=8"


def test_rows_are_those_that_train_can_split() -> None:
    """Over devices and parts of a step together, whatever the candidate changes."""
    seen = set()
    for one in (job(rows=6), job(rows=6, num_devices=2, mesh="data=2", optimizer=OptimizerConfig(accumulation=3))):
        for candidate in remedies.candidates(one, GPU):
            changed = candidate.job
            sizes = parse_mesh(changed.mesh, changed.num_devices)
            assert changed.rows % (sizes["data"] * sizes["fsdp"] * changed.optimizer.accumulation) == 0, candidate
            seen |= set(candidate.changes)
    assert seen == {"mesh", "optimizer", "accumulation", "batch_size", "num_devices"}
    fewer = [c.job for c in remedies.candidates(job(rows=6), GPU) if "batch_size" in c.changes]
    assert [(one.trajectories, one.rows) for one in fewer] == [(16, 3), (8, 2), (4, 1)]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and gradients of 100 bytes over the devices; half of it where it is compact."""

    def least(one: Job, accelerator) -> int:
        return 100 // one.num_devices // (2 if one.optimizer.optimizer == "adamw_compact" else 1)

    monkeypatch.setattr(remedies, "least_bytes", least)


def compiled(one: Job, accelerator):
    total = remedies.least_bytes(one, accelerator) + one.rows // one.num_devices
    return SimpleNamespace(memory=SimpleNamespace(total=total), refused="")


def test_only_what_can_fit_is_compiled(sizes) -> None:
    said: list[str] = []
    found = remedies.find(job(), GPU, 55, 2, said.append, compiled)
    # Compact alone is 50 + 8 rows, and in this world parts save nothing; half of the batch is 50 + 4.
    assert [(r.flags[-1], r.rows, r.total) for r in found] == [("--batch_size=16", 4, 54), ("--num_devices=2", 8, 54)]
    assert said[0] == "trying      --optimizer=adamw_compact"
    found = remedies.find(job(), GPU, 30, 2, lambda _: None, compiled)
    assert [(r.flags[-1], r.total) for r in found] == [("--num_devices=4", 27)]  # more than four is no other remedy


def test_what_the_compiler_refuses_is_no_remedy(sizes) -> None:
    def refused(one: Job, accelerator):
        return SimpleNamespace(memory=SimpleNamespace(total=1), refused="Ran out of memory")

    assert remedies.find(job(), GPU, 200, 2, lambda _: None, refused) == []


def test_what_the_model_does_not_allow_is_passed_over(sizes) -> None:
    def refuses(one: Job, accelerator):
        if one.num_devices < 8:
            raise UserError("--mesh: does not divide")
        return compiled(one, accelerator)

    found = remedies.find(job(), GPU, 30, 1, lambda _: None, refuses)
    assert [r.flags[-1] for r in found] == ["--num_devices=8"]
