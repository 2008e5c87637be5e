"""Selection of devices: the requested accelerator, or an error with how to install its JAX."""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import logging
import os
import pathlib
from collections.abc import Sequence

import jax

from cfprm_jax.errors import UserError

_HOW_TO_INSTALL = {
    "gpu": "for an NVIDIA GPU: pip install '.[cuda12]' (or '.[cuda13]', as the driver supports; see nvidia-smi)",
    "tpu": "on a TPU VM: pip install '.[tpu]'",
}


def select(platform: str) -> list[jax.Device]:
    """All devices of a platform.

    Args:
      platform: cpu, gpu, tpu, or auto for what JAX takes by itself (an accelerator where one is set up).

    Raises:
      UserError: the platform is not there. Nothing ever falls back to the CPU.
    """
    prepare(platform)
    if platform == "auto":
        return jax.devices()
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        here = ", ".join(sorted({d.platform for d in jax.devices()}))
        message = f"--platform={platform}: JAX {jax.__version__} finds no {platform.upper()} here, only {here}."
        if platform in _HOW_TO_INSTALL:
            message += f" Install its JAX: {_HOW_TO_INSTALL[platform]}."
        if os.environ.get("JAX_PLATFORMS"):
            message += f" Besides, the environment sets JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}."
        raise UserError(f"{message} Or run with --platform=cpu. (JAX: {error})".replace("\n", " ")) from error


_PLATFORMS = "jax_platforms"

# Parameters of glibc's mallopt (malloc.h). Nothing is mapped by itself, and -1 is never to give the heap's end back.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEEP = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}


def keep_freed_memory(devices: Sequence[jax.Device]) -> bool:
    """On CPU devices, let the process keep the buffers that it frees for the next step; whether that was possible.

    glibc gives large buffers back to the system as soon as they are free, and every step then pays for the page faults
    of the same buffers again: a third of the time of a small model's step. The process holds its peak until it ends.
    The threads that run a step have a part in that only after :func:`prepare`.
    """
    return all(device.platform == "cpu" for device in devices) and _mallopt(_KEEP)


def prepare(platform: str) -> None:
    """Settings of JAX and of the process's heap for a platform; call it before JAX initialises its devices.

    With platform=cpu JAX initialises no other platform: plugins of accelerators that are installed but not used, as by
    the extra aot, would print their errors. Otherwise such an error is one line without its traceback. On CPU devices
    JAX's threads share the process's heap, which :func:`keep_freed_memory` relies on.
    """
    if platform == "cpu" and not getattr(jax.config, _PLATFORMS):
        jax.config.update(_PLATFORMS, "cpu")
    logging.getLogger("jax._src.xla_bridge").addFilter(_in_one_line)  # a filter is added once
    if _is_cpu(platform):
        _mallopt({_M_ARENA_MAX: 1})


def _in_one_line(record: logging.LogRecord) -> bool:
    """A filter of a logger: a record has its exception's text in place of the traceback."""
    if record.exc_info and record.exc_info[1] is not None:
        error = " ".join(str(record.exc_info[1]).split())
        record.msg, record.args = "%s: %s", (record.getMessage(), error)
        record.exc_info = record.exc_text = None
    return True


def _is_cpu(platform: str) -> bool:
    """Whether the devices will be CPUs, as far as this is known before JAX initialises them.

    JAX then starts threads, each of which would have its own arena, and thread arenas return large buffers to the
    system in spite of keep_freed_memory. On machines with accelerators the host's threads do better with their own.
    """
    if platform != "auto":
        return platform == "cpu"
    plugins = any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not plugins


def _mallopt(parameters: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc
        return False
    accepted = [mallopt(parameter, value) for parameter, value in parameters.items()]
    return all(accepted)


def describe(devices: Sequence[jax.Device]) -> str:
    """Kinds and numbers, such as "8 x NVIDIA H100 80GB HBM3 (gpu)"."""
    kinds = collections.Counter(f"{d.device_kind} ({d.platform})" for d in devices)
    described = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    processes = len({d.process_index for d in devices})
    return f"{described} in {processes} processes" if processes > 1 else described


def memory(devices: Sequence[jax.Device]) -> dict[str, int | None]:
    """Bytes in use and at the peak so far, of this process's fullest device; None where a device does not report it."""
    stats = [device.memory_stats() or {} for device in devices if device.process_index == jax.process_index()]

    def most(name: str) -> int | None:
        return max((s[name] for s in stats if name in s), default=None)

    return {"memory_in_use": most("bytes_in_use"), "memory_peak": most("peak_bytes_in_use")}


def unused_accelerator(
    devices: Sequence[jax.Device], device_files: Sequence[str] = ("/dev/nvidia0", "/dev/accel0")
) -> str:
    """A note for --platform=auto when the machine has an accelerator that JAX was not set up for; else empty."""
    present = [name for name in device_files if pathlib.Path(name).exists()]
    if not present or any(d.platform != "cpu" for d in devices):
        return ""
    kind = "gpu" if "nvidia" in present[0] else "tpu"
    return f"note: {present[0]} is here, but JAX runs on the CPU. To use it, {_HOW_TO_INSTALL[kind]}"
