"""Remedies for a step that does not fit: which are tried, in which order, and the result."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from cfprm_jax.config import DeviceConfig, FrozenConfig, LoraConfig, ModelConfig, OptimizerConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import remedies
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.planning.ahead import PlannedStep
from cfprm_jax.planning.start import Start
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.sharding.rules import parse_mesh

GPU = ACCELERATORS["h100-80gb"]
NET = BackboneConfig(64, 16, 32, 2, 4, 2, 4)


MODEL = ModelConfig(dtype="bfloat16", remat="layer")


def planned(rows: int = 8, num_devices: int = 1, mesh: str = "data=-1", **changes) -> PlannedStep:
    config = TrainConfig(model=MODEL, device=DeviceConfig(mesh=mesh))
    return PlannedStep(dataclasses.replace(config, **changes), NET, num_devices, rows, 128)


def flags(one: PlannedStep, accelerator=GPU) -> list[str]:
    return [" ".join(trial.flags) for trial in remedies.trials(one, accelerator)]


def test_on_one_card() -> None:
    compact = "--optimizer=adamw_compact"
    assert flags(planned())[:8] == [
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
    found = flags(planned(model=dataclasses.replace(MODEL, remat="mlp")))
    assert found[:3] == ["--remat=layer", "--optimizer=adamw_compact", "--remat=layer --optimizer=adamw_compact"]
    assert all(text.startswith("--remat=layer") for text in found if "accumulation" in text)


def test_on_several_the_weights_are_split_first() -> None:
    split, compact = "--mesh=data=1,fsdp=-1,tensor=1", "--optimizer=adamw_compact"
    assert flags(planned(num_devices=8))[:4] == [split, compact, f"{split} {compact}", f"{split} --num_devices=16"]


def test_float32_is_not_made_compact() -> None:
    assert not any("compact" in text for text in flags(planned(model=dataclasses.replace(MODEL, dtype="float32"))))
    assert flags(planned(optimizer=OptimizerConfig(optimizer="adamw_compact", accumulation=4)))[0] == "--accumulation=8"


def test_of_a_run_with_frozen_weights() -> None:
    """A cache takes the frozen layers' place; adapters are not held compactly, which train refuses."""
    cache, compact = "--cache_frozen=auto", "--optimizer=adamw_compact"
    frozen = FrozenConfig(frozen_layers=1)
    assert flags(planned(frozen=frozen))[:4] == [
        cache,
        compact,
        f"{cache} {compact}",
        f"{cache} {compact} --accumulation=2",
    ]
    adapters = LoraConfig(lora_rank=4)
    assert flags(planned(lora=adapters))[0] == "--accumulation=2"
    assert flags(planned(lora=adapters, frozen=frozen))[:2] == [cache, f"{cache} --accumulation=2"]
    cached = FrozenConfig(frozen_layers=1, cache_frozen="somewhere")
    assert not any("cache_frozen" in text for text in flags(planned(frozen=cached)))


def test_rows_are_those_that_train_can_split() -> None:
    """Over devices and parts of a step together, whatever the trial changes."""
    seen = set()
    for one in (
        planned(rows=6),
        planned(rows=6, num_devices=2, mesh="data=2", optimizer=OptimizerConfig(accumulation=3)),
    ):
        for trial in remedies.trials(one, GPU):
            changed = trial.planned
            sizes = parse_mesh(changed.config.device.mesh, changed.num_devices)
            assert changed.rows % (sizes["data"] * sizes["fsdp"] * changed.config.optimizer.accumulation) == 0, trial
            seen |= set(trial.changes)
    assert seen == {"mesh", "optimizer", "accumulation", "batch_size", "num_devices"}
    fewer = [c.planned for c in remedies.trials(planned(rows=6), GPU) if "batch_size" in c.changes]
    assert [(one.trajectories, one.rows) for one in fewer] == [(16, 3), (8, 2), (4, 1)]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and gradients of 100 bytes over the devices; half of it where it is compact."""

    def least(one: PlannedStep, accelerator) -> int:
        return 100 // one.num_devices // (2 if one.config.optimizer.optimizer == "adamw_compact" else 1)

    monkeypatch.setattr(remedies, "least_bytes", least)


def compiled(one: PlannedStep, accelerator):
    total = remedies.least_bytes(one, accelerator) + one.rows // one.num_devices
    return SimpleNamespace(memory=SimpleNamespace(total=total), refused="")


def light(one: PlannedStep, accelerator):
    """A step that fits everywhere."""
    return SimpleNamespace(memory=SimpleNamespace(total=40), refused="")


def started(one: PlannedStep, accelerator):
    """A start that takes less than every step."""
    return Start(0, "loading")


def test_only_what_can_fit_is_compiled(sizes) -> None:
    logged: list[str] = []
    found = remedies.find(planned(), GPU, 55, 2, log=logged.append, compiled=compiled, started=started)
    # Compact alone is 50 + 8 rows, and in this world parts save nothing; half of the batch is 50 + 4.
    assert [(r.flags[-1], r.rows, r.total) for r in found] == [("--batch_size=16", 4, 54), ("--num_devices=2", 8, 54)]
    assert logged[0] == "trying      --optimizer=adamw_compact"
    found = remedies.find(planned(), GPU, 30, 2, compiled=compiled, started=started)
    assert [(r.flags[-1], r.total) for r in found] == [("--num_devices=4", 27)]  # more than four is no other remedy


def test_the_start_has_to_fit_too(monkeypatch) -> None:
    """Of 90 bytes a device, whatever the step is like; 60 of a compact optimizer."""
    monkeypatch.setattr(remedies, "least_bytes", lambda one, accelerator: 0)
    asked: list[str] = []

    def starts(one: PlannedStep, accelerator):
        asked.append(one.config.optimizer.optimizer)
        return Start((60 if one.config.optimizer.optimizer == "adamw_compact" else 90) // one.num_devices, "loading")

    logged: list[str] = []
    one = planned(rows=4, model=dataclasses.replace(MODEL, remat="mlp"))
    found = remedies.find(one, GPU, 70, 1, log=logged.append, compiled=light, started=starts)
    assert [(r.flags, r.total) for r in found] == [(("--optimizer=adamw_compact",), 60)]
    assert asked == ["adamw", "adamw_compact"]
    # A start that is too large is compiled once, and no step after it that starts alike.
    asked.clear()
    logged.clear()
    found = remedies.find(one, GPU, 50, 1, log=logged.append, compiled=light, started=starts)
    assert [(r.flags[-1], r.total) for r in found] == [("--num_devices=2", 45)]
    assert [text.split(maxsplit=1)[1] for text in logged] == [
        "--remat=layer",
        "--optimizer=adamw_compact",
        "--mesh=data=1,fsdp=-1,tensor=1 --num_devices=2",
    ]
    assert asked == ["adamw", "adamw_compact", "adamw"]


def test_what_the_compiler_refuses_is_no_remedy(sizes) -> None:
    def refused(one: PlannedStep, accelerator):
        return SimpleNamespace(memory=SimpleNamespace(total=1), refused="Ran out of memory")

    assert remedies.find(planned(), GPU, 200, 2, compiled=refused, started=started) == []


def test_what_the_model_does_not_allow_is_passed_over(sizes) -> None:
    def refuses(one: PlannedStep, accelerator):
        if one.num_devices < 8:
            raise UserError("--mesh: does not divide")
        return compiled(one, accelerator)

    found = remedies.find(planned(), GPU, 30, 1, compiled=refuses, started=started)
    assert [r.flags[-1] for r in found] == ["--num_devices=8"]
