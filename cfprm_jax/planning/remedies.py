"""Changes of flags that make a step fit: less memory, fewer rows, or more devices. Each is compiled first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cfprm_jax.errors import UserError
from cfprm_jax.planning.accelerators import Gpu, Tpu, larger
from cfprm_jax.planning.ahead import Compiled, PlannedStep, least_bytes, round_rows
from cfprm_jax.planning.start import Start
from cfprm_jax.runtime.out_of_memory import SHARDED, savings
from cfprm_jax.sharding.rules import parse_mesh


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of flags that fits, the rows of a batch with it, and bytes on each device, of step or start."""

    flags: tuple[str, ...]
    rows: int
    total: int


class Trial(NamedTuple):
    """A step with some flags changed: flag -> its value."""

    changes: dict[str, Any]
    planned: PlannedStep

    @property
    def flags(self) -> tuple[str, ...]:
        """As they are typed."""
        return tuple(f"--{name}={value}" for name, value in self.changes.items())


def trials(planned: PlannedStep, accelerator: Gpu | Tpu) -> Iterator[Trial]:
    """Changes of flags in ascending order of their cost.

    First what leaves the training as it is: remat, a mesh that shards the state, a cache in place of the frozen layers,
    the compact optimizer, and gradient accumulation; then smaller batches, on top of all of these; then more devices.
    """
    config = planned.config
    unsharded = parse_mesh(config.device.mesh, planned.num_devices)["fsdp"] < planned.num_devices
    thrifty: dict[str, Any] = dict(
        savings(config.model, config.optimizer, config.lora, config.frozen, unsharded=unsharded)
    )
    for number in range(1, len(thrifty) + 1):
        for names in itertools.combinations(thrifty, number):
            yield _changed(planned, {name: thrifty[name] for name in names})
    base = _changed(planned, thrifty).planned
    accumulation = base.config.optimizer.accumulation
    while accumulation < base.rows // _row_groups(base):
        accumulation *= 2
        yield _changed(planned, {**thrifty, "accumulation": accumulation})
    rows, trajectories, batch_tokens = base.rows, base.trajectories, config.packing.batch_tokens
    while trajectories > 1:
        trajectories //= 2
        share = trajectories / base.trajectories
        smaller = {"batch_tokens": int(batch_tokens * share)} if batch_tokens else {"batch_size": trajectories}
        fewer = _changed(planned, {**thrifty, **smaller})
        if fewer.planned.rows < rows:
            rows = fewer.planned.rows
            yield fewer
    for number in larger(accelerator, planned.num_devices):
        yield _changed(planned, {"mesh": SHARDED, "num_devices": number})


def find(
    planned: PlannedStep,
    accelerator: Gpu | Tpu,
    limit: int,
    most: int = 2,
    *,
    compiled: Callable[[PlannedStep, Gpu | Tpu], Compiled],
    started: Callable[[PlannedStep, Gpu | Tpu], Start],
    log: Callable[[str], None] = lambda _: None,
) -> list[Remedy]:
    """The first remedies whose step and start fit into limit bytes on each device, at most `most`.

    What cannot fit is not compiled, nor is a trial that changes all flags of a remedy already found, and more.

    Args:
      compiled, started: compile the step, and the start before it.
    """
    found: list[Remedy] = []
    enough: list[set[str]] = []
    starts: dict[frozenset[tuple[str, Any]], int] = {}  # changes of the start -> its bytes
    for trial in trials(planned, accelerator):
        if len(found) == most:
            break
        if any(names <= set(trial.changes) for names in enough):
            continue
        of_start = frozenset(change for change in trial.changes.items() if change[0] not in _OF_THE_STEP_ALONE)
        if starts.get(of_start, 0) > limit:
            continue
        try:
            if least_bytes(trial.planned, accelerator) > limit:
                continue
            log(f"trying      {' '.join(trial.flags)}")
            result = compiled(trial.planned, accelerator)
            if result.refused or result.memory.total > limit:
                continue
            if of_start not in starts:
                starts[of_start] = started(trial.planned, accelerator).total
        except UserError:  # a mesh that does not divide this model
            continue
        total = max(result.memory.total, starts[of_start])
        if total <= limit:
            found.append(Remedy(trial.flags, trial.planned.rows, total))
            enough.append(set(trial.changes))
    return found


# Flags of a trial that leave the start as it is: what is created before the first step does not depend on them.
_OF_THE_STEP_ALONE = ("remat", "accumulation", "batch_size", "batch_tokens")
# Flags that a trial changes -> the group of options that holds them; num_devices is of the plan alone.
_GROUPS = {
    "remat": "model",
    "mesh": "device",
    "cache_frozen": "frozen",
    "optimizer": "optimizer",
    "accumulation": "optimizer",
    "batch_size": "packing",
    "batch_tokens": "packing",
}


def _changed(planned: PlannedStep, changes: dict[str, Any]) -> Trial:
    """The step with these flags, in rows that its devices and microbatches divide."""
    config = planned.config
    for name, group in _GROUPS.items():
        if name in changes:
            options = dataclasses.replace(getattr(config, group), **{name: changes[name]})
            config = dataclasses.replace(config, **{group: options})
    rows, trajectories = planned.rows, planned.trajectories
    if "batch_size" in changes:
        trajectories = changes["batch_size"]
        rows = -(-planned.rows * trajectories // planned.trajectories)
    if "batch_tokens" in changes:
        rows = -(-planned.rows * changes["batch_tokens"] // planned.config.packing.batch_tokens)
    num_devices = changes.get("num_devices", planned.num_devices)
    rows = round_rows(rows, config.device.mesh, num_devices, config.optimizer.accumulation)
    changed = dataclasses.replace(planned, config=config, num_devices=num_devices, rows=rows, trajectories=trajectories)
    return Trial(changes, changed)


def _row_groups(planned: PlannedStep) -> int:
    """Devices, or groups of tensor-parallel ones, that rows are sharded over."""
    return round_rows(1, planned.config.device.mesh, planned.num_devices, 1)
