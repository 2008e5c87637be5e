"""What would make a step fit: the same in less memory, fewer rows, or more devices. Compiled before it is said."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cfprm_jax.errors import UserError
from cfprm_jax.planning.accelerators import Gpu, Tpu, larger
from cfprm_jax.planning.ahead import Compiled, Job, compile_step, least_bytes, round_rows
from cfprm_jax.sharding.rules import parse_mesh

SHARDED = "data=1,fsdp=-1,tensor=1"


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of flags that fits, the rows of a batch with it, and bytes on each device."""

    flags: tuple[str, ...]
    rows: int
    total: int


class Candidate(NamedTuple):
    """A job with some flags changed: flag -> its value."""

    changes: dict[str, Any]
    job: Job

    @property
    def flags(self) -> tuple[str, ...]:
        """As they are typed."""
        return tuple(f"--{name}={value}" for name, value in self.changes.items())


def candidates(job: Job, accelerator: Gpu | Tpu) -> Iterator[Candidate]:
    """In the order in which they cost least.

    First what leaves the training as it is: remat, a mesh that splits the state, the compact optimizer, and a step in
    parts; then smaller batches, on top of all of these; then more devices.
    """
    thrifty: dict[str, Any] = {}
    if job.remat != "layer":
        thrifty["remat"] = "layer"
    if parse_mesh(job.mesh, job.num_devices)["fsdp"] < job.num_devices:
        thrifty["mesh"] = SHARDED
    if job.optimizer.optimizer == "adamw" and job.dtype == "bfloat16":
        thrifty["optimizer"] = "adamw_compact"
    for number in range(1, len(thrifty) + 1):
        for names in itertools.combinations(thrifty, number):
            yield _changed(job, {name: thrifty[name] for name in names})
    base = _changed(job, thrifty).job
    parts = base.optimizer.accumulation
    while parts < base.rows // _row_groups(base):
        parts *= 2
        yield _changed(job, {**thrifty, "accumulation": parts})
    rows, trajectories = base.rows, base.trajectories
    while trajectories > 1:
        trajectories //= 2
        share = trajectories / base.trajectories
        smaller = {"batch_tokens": int(job.batch_tokens * share)} if job.batch_tokens else {"batch_size": trajectories}
        fewer = _changed(job, {**thrifty, **smaller})
        if fewer.job.rows < rows:
            rows = fewer.job.rows
            yield fewer
    for number in larger(accelerator, job.num_devices):
        yield _changed(job, {"mesh": SHARDED, "num_devices": number})


def find(
    job: Job,
    accelerator: Gpu | Tpu,
    limit: int,
    most: int = 2,
    say: Callable[[str], None] = lambda _: None,
    compiled: Callable[[Job, Gpu | Tpu], Compiled] = compile_step,
) -> list[Remedy]:
    """The first remedies that fit into limit bytes a device, at most `most`; what cannot fit is not compiled.

    Nor is what changes the flags of a remedy that was found, and more.
    """
    found: list[Remedy] = []
    enough: list[set[str]] = []
    for candidate in candidates(job, accelerator):
        if len(found) == most:
            break
        if any(names <= set(candidate.changes) for names in enough):
            continue
        try:
            if least_bytes(candidate.job, accelerator) > limit:
                continue
            say(f"trying      {' '.join(candidate.flags)}")
            result = compiled(candidate.job, accelerator)
        except UserError:  # a mesh that does not divide this model
            continue
        if not result.refused and result.memory.total <= limit:
            found.append(Remedy(candidate.flags, candidate.job.rows, result.memory.total))
            enough.append(set(candidate.changes))
    return found


def _changed(job: Job, changes: dict[str, Any]) -> Candidate:
    """The job with these flags, in rows that their devices and parts divide."""
    own = {name: changes[name] for name in ("remat", "mesh", "num_devices") if name in changes}
    of_optimizer = {name: changes[name] for name in ("optimizer", "accumulation") if name in changes}
    changed = dataclasses.replace(job, **own, optimizer=dataclasses.replace(job.optimizer, **of_optimizer))
    rows = job.rows
    if "batch_size" in changes:
        changed = dataclasses.replace(changed, trajectories=changes["batch_size"])
        rows = -(-job.rows * changed.trajectories // job.trajectories)
    if "batch_tokens" in changes:
        changed = dataclasses.replace(changed, batch_tokens=changes["batch_tokens"])
        rows = -(-job.rows * changed.batch_tokens // job.batch_tokens)
    rows = round_rows(rows, changed.mesh, changed.num_devices, changed.optimizer.accumulation)
    return Candidate(changes, dataclasses.replace(changed, rows=rows))


def _row_groups(job: Job) -> int:
    """Devices, or groups of tensor-parallel ones, that rows are split over."""
    return round_rows(1, job.mesh, job.num_devices, 1)
