"""The accelerators that a step can be compiled for, as XLA's compilers describe them.

Figures are those of the vendors' data sheets and programming guides, and the memory that drivers report. The compiler
uses them to decide what fits; none of them is a promise of speed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

from cfprm_jax.errors import UserError

GIB = 1 << 30
INSTALL = "pip install '.[aot]'"
_GPUS_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
      name: JAX's device_kind.
      compute_capability: major and minor.
      multiprocessors, float32_units: streaming multiprocessors, and float32 lanes in each.
      clock_ghz: boost clock.
      memory: bytes that CUDA reports, which is less than is printed on the card.
      bandwidth: of the memory, bytes a second.
      l2: bytes of the second-level cache.
      shared: bytes of shared memory in a multiprocessor; a block may use all but 1 KiB.
      threads: most of them on a multiprocessor.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    float32_units: int
    clock_ghz: float
    memory: int
    bandwidth: int
    l2: int
    shared: int
    threads: int = 2048

    platform = "cuda"
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    # CUDA's context, cuDNN's workspaces and NCCL's buffers are not in the compiler's plan.
    reserve = 4 * GIB

    def topology(self, num_devices: int) -> dict[str, Any]:
        """Arguments of jax.experimental.topologies.get_topology_desc for num_devices GPUs, eight to a host."""
        hosts, rest = divmod(num_devices, _GPUS_A_HOST)
        if num_devices > _GPUS_A_HOST and rest:
            raise UserError(f"--num_devices={num_devices}: hosts have {_GPUS_A_HOST} GPUs; give a multiple of that")
        shape = f"1x{hosts}x{_GPUS_A_HOST}" if num_devices > _GPUS_A_HOST else f"1x1x{num_devices}"
        return {"topology_name": "", "target_config": self.target_config(), "topology": shape}

    def target_config(self) -> str:
        """The device as XLA's GpuTargetConfigProto in text form."""
        major, minor = self.compute_capability
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 << 10,
            "shared_memory_per_block_optin": self.shared - (1 << 10),
            "shared_memory_per_core": self.shared,
            "threads_per_core_limit": self.threads,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.float32_units,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "registers_per_core_limit": 64 << 10,
            "registers_per_block_limit": 64 << 10,
            "memory_bandwidth": self.bandwidth,
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory,
        }
        lines = [*(f"{key}: {value}" for key, value in device.items())]
        lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
        # Without a version XLA assumes a cuDNN without attention; JAX's wheels require at least this one.
        return (
            f"gpu_device_info {{ {' '.join(lines)} }}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 8 }}\ndevice_description_str: "{self.name}"\n'
        )


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A generation of TPU.

    Attributes:
      name: as libtpu calls it.
      memory: bytes of HBM that programs may use.
      slices: numbers of chips that are sold together -> their arrangement.
    """

    name: str
    memory: int
    slices: dict[int, str]

    platform = "tpu"
    plugins = ("libtpu",)
    reserve = GIB // 4

    def topology(self, num_devices: int) -> dict[str, Any]:
        """Arguments of jax.experimental.topologies.get_topology_desc for num_devices chips."""
        if num_devices not in self.slices:
            known = ", ".join(map(str, self.slices))
            raise UserError(f"--num_devices={num_devices}: slices of {self.name} have {known} chips")
        return {"topology_name": f"{self.name}:{self.slices[num_devices]}"}


_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}

_H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    multiprocessors=132,
    float32_units=128,
    clock_ghz=1.98,
    memory=round(79.1 * GIB),
    bandwidth=3_350_000_000_000,
    l2=50 << 20,
    shared=228 << 10,
)

_A100 = Gpu(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability=(8, 0),
    multiprocessors=108,
    float32_units=64,
    clock_ghz=1.41,
    memory=round(79.1 * GIB),
    bandwidth=2_039_000_000_000,
    l2=40 << 20,
    shared=164 << 10,
)

ACCELERATORS: dict[str, Gpu | Tpu] = {
    "h100-80gb": _H100,
    # The chip of the H100 with slower links between cards and hardly any float64.
    "h800-80gb": dataclasses.replace(_H100, name="NVIDIA H800"),
    "h200": dataclasses.replace(_H100, name="NVIDIA H200", memory=round(139.8 * GIB), bandwidth=4_800_000_000_000),
    "a100-80gb": _A100,
    "a100-40gb": dataclasses.replace(
        _A100, name="NVIDIA A100-SXM4-40GB", memory=round(39.4 * GIB), bandwidth=1_555_000_000_000
    ),
    "rtx4090-24gb": Gpu(
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        multiprocessors=128,
        float32_units=128,
        clock_ghz=2.52,
        memory=round(23.6 * GIB),
        bandwidth=1_008_000_000_000,
        l2=72 << 20,
        shared=100 << 10,
        threads=1536,
    ),
    "v5e": Tpu("v5e", round(15.75 * GIB), _FLAT),
    "v5p": Tpu("v5p", round(95.74 * GIB), _CUBES),
    "v6e": Tpu("v6e", round(31.25 * GIB), _FLAT),
}
"""--accelerator -> facts."""


def require_plugin(accelerator: Gpu | Tpu) -> None:
    """UserError, with the command that installs it, where this environment has no compiler for the accelerator."""
    for plugin in accelerator.plugins:
        try:
            if importlib.util.find_spec(plugin) is not None:
                return
        except ModuleNotFoundError:
            continue
    raise UserError(f"compiling for {accelerator.name} needs its XLA compiler, which runs on any CPU: {INSTALL}")


def larger(accelerator: Gpu | Tpu, num_devices: int) -> list[int]:
    """Numbers of devices above num_devices that may be tried, ascending."""
    if isinstance(accelerator, Tpu):
        return [number for number in accelerator.slices if number > num_devices]
    return [2**k for k in range(1, 9) if 2**k > num_devices]


def usable(accelerator: Gpu | Tpu, reserve_gib: float) -> int:
    """Bytes of a device that a step may take; a negative reserve is the accelerator's own."""
    reserve = accelerator.reserve if reserve_gib < 0 else math.ceil(reserve_gib * GIB)
    return accelerator.memory - reserve
