"""Restoring of the newest undamaged checkpoint of a run onto any mesh, verified by its checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from cfprm_jax.checkpoints import checksums, orbax_files, retention
from cfprm_jax.errors import UserError
from cfprm_jax.runtime.distributed import Processes


@dataclasses.dataclass(frozen=True)
class Restored:
    """The content of a restored checkpoint."""

    step: int
    state: Any  # training.step.TrainState
    data: dict[str, Any]  # of the loader's iterator
    meta: dict[str, Any]


def newest(
    folder: pathlib.Path,
    abstract_state: Any,
    processes: Processes,
    accept: Callable[[dict[str, Any]], None],
    log: Callable[[str], None],
) -> Restored:
    """Restore the newest undamaged checkpoint of a folder. Damaged newer ones are renamed, with a line in the log.

    Args:
      abstract_state: jax.ShapeDtypeStruct with a sharding in every leaf; any mesh.
      accept: raises if a checkpoint with this meta must not be gone on with.

    Raises:
      UserError: none is whole, or what accept raises. Nothing is renamed then.
    """
    bad: dict[int, str] = {}
    for step in processes.share(lambda: retention.complete(folder)[::-1]):
        at = folder / str(step)
        meta, fault = _together(processes, functools.partial(orbax_files.read_json, at, "meta"))
        if fault is None:
            accept(meta)
            state, fault = _together(processes, functools.partial(_read_state, at, abstract_state))
        if fault is None:
            _, fault = _together(processes, functools.partial(checksums.verify, at, state, meta))
        if fault is None:
            data, fault = _together(processes, functools.partial(orbax_files.read_json, at, "data"))
        if fault is None:
            _set_aside(folder, bad, processes, log)
            if note := checksums.note(at, meta):
                log(f"resume      {note}")
            return Restored(step, state, data, meta)
        bad[step] = fault
    raise UserError("; ".join(bad.values()) or f"{folder} has no checkpoint")


def _set_aside(folder: pathlib.Path, bad: Mapping[int, str], processes: Processes, log: Callable[[str], None]) -> None:
    for step, fault in bad.items():
        if processes.first:
            log(f"resume      {fault}; it is set aside as {retention.set_aside(folder, step)}")
    processes.barrier()


def _together(processes: Processes, read: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what read gives, None), or (None, why not) on all processes if it fails on one."""
    result, fault = None, None
    try:
        result = read()
    except orbax_files.DamagedError as error:
        fault = str(error)
    faults = [text for text in processes.gather(fault) if text is not None]
    return (None, faults[0]) if faults else (result, None)


def _read_state(checkpoint: pathlib.Path, abstract_state: Any) -> Any:
    """No process waits for another one in here, so one that cannot read its part does not keep the others.

    Raises:
      DamagedError: files are missing or damaged, or the arrays differ from abstract_state in name, shape or type; all
        differences are listed.
    """
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler, orbax_files.damaged(checkpoint):
        found = handler.metadata(epath.Path(checkpoint / "state"))
        orbax_files.require_equal(
            str(checkpoint), orbax_files.described(abstract_state), orbax_files.described(found.tree)
        )
        return handler.restore(epath.Path(checkpoint / "state"), args=ocp.args.StandardRestore(abstract_state))
