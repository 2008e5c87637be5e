"""What would make a step fit: less memory for the same training, or more devices. Compiled before it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from cfprm_jax.errors import UserError
from cfprm_jax.planning.accelerators import Gpu, Tpu, larger
from cfprm_jax.planning.ahead import Compiled, Job, compile_step, least_bytes
from cfprm_jax.training.sharding import parse_mesh

SHARDED = "data=1,fsdp=-1,tensor=1"


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of flags that fits."""

    flags: tuple[str, ...]
    total: int


def candidates(job: Job, accelerator: Gpu | Tpu) -> Iterator[tuple[tuple[str, ...], Job]]:
    """(flags, job) in the order in which they cost least."""
    compact = dataclasses.replace(job, optimizer=dataclasses.replace(job.optimizer, optimizer="adamw_compact"))
    can_compact = job.optimizer.optimizer == "adamw" and job.dtype == "bfloat16"
    layouts: list[tuple[tuple[str, ...], Job]] = [((), job)]
    if parse_mesh(job.mesh, job.num_devices)["fsdp"] < job.num_devices:
        layouts.append(((f"--mesh={SHARDED}",), dataclasses.replace(job, mesh=SHARDED)))
    for flags, changed in layouts:
        if flags:
            yield flags, changed
        if can_compact:
            yield (*flags, "--optimizer=adamw_compact"), dataclasses.replace(changed, optimizer=compact.optimizer)
    flags, changed = layouts[-1]
    if can_compact:
        flags = (*flags, "--optimizer=adamw_compact")
        changed = dataclasses.replace(changed, optimizer=compact.optimizer)
    rows_a_device = job.rows // job.num_devices
    parts = job.optimizer.accumulation
    while parts < rows_a_device:
        parts *= 2
        split = dataclasses.replace(changed.optimizer, accumulation=parts)
        yield (*flags, f"--accumulation={parts}"), dataclasses.replace(changed, optimizer=split)
    for number in larger(accelerator, job.num_devices):
        rows = -(-job.rows // number) * number
        wider = dataclasses.replace(job, mesh=SHARDED, num_devices=number, rows=rows)
        yield (f"--mesh={SHARDED}", f"--num_devices={number}"), wider


def find(
    job: Job,
    accelerator: Gpu | Tpu,
    limit: int,
    most: int = 2,
    say: Callable[[str], None] = lambda _: None,
    compiled: Callable[[Job, Gpu | Tpu], Compiled] = compile_step,
) -> list[Remedy]:
    """The first remedies that fit into limit bytes a device, at most `most`; what cannot fit is not compiled."""
    found: list[Remedy] = []
    for flags, changed in candidates(job, accelerator):
        if len(found) == most:
            break
        try:
            if least_bytes(changed, accelerator) > limit:
                continue
            say(f"trying      {' '.join(flags)}")
            total = compiled(changed, accelerator).memory.total
        except UserError:  # a mesh that does not divide this model
            continue
        if total <= limit:
            found.append(Remedy(flags, total))
    return found
