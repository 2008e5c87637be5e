"""Device setup of a command: devices, host memory, compilation cache and mesh."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from cfprm_jax.config import DeviceConfig
from cfprm_jax.runtime import caches, determinism, devices
from cfprm_jax.sharding import rules

_CACHE = "jax_compilation_cache_dir"


class Session(NamedTuple):
    """The devices of a command, and their mesh."""

    devices: list[jax.Device]
    mesh: Mesh  # over them

    def describe(self) -> str:
        """Kinds and number of the devices, and the mesh."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"{devices.describe(self.devices)}, mesh {axes}"


@contextlib.contextmanager
def opened(
    config: DeviceConfig,
    log: Callable[[str], None] | None = None,
    deterministic: bool = False,
    of_all_processes: bool = False,
) -> Iterator[Session]:
    """Devices and mesh inside the block; the previous compilation cache is restored after it.

    Args:
      log: called with the line about the devices, and a note if --platform=auto leaves an accelerator unused.
      deterministic: --deterministic.
      of_all_processes: take the devices of all processes under jax.distributed, for one computation of them all;
        otherwise only those of this process.

    Raises:
      UserError: the platform is not there, the mesh does not fit it, or the compile cache cannot be made.
    """
    chosen = devices.select(config.platform)
    if not of_all_processes:
        chosen = [device for device in chosen if device.process_index == jax.process_index()]
    if deterministic and chosen[0].platform == "gpu":
        determinism.fix_collectives(os.environ)
    devices.keep_freed_memory(chosen)
    session = Session(chosen, rules.make_mesh(config, chosen))
    before = getattr(jax.config, _CACHE)
    caches.use_compile_cache(config.compile_cache_dir)
    try:
        if log is not None:
            log(f"devices     {session.describe()}")
            note = devices.unused_accelerator(chosen) if config.platform == "auto" else ""
            if note:
                log(note)
        yield session
    finally:
        jax.config.update(_CACHE, before)
