"""The train step compiled by XLA for an absent accelerator: memory, kernels and collectives."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from cfprm_jax.config import DeviceConfig
from cfprm_jax.data.distinct import DistinctSteps
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import parameters
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import activations
from cfprm_jax.planning.accelerators import GIB, INSTALL, Gpu, Tpu, require_plugin
from cfprm_jax.planning.hlo import Collective, CompiledText
from cfprm_jax.run import assembly
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.sharding import rules
from cfprm_jax.training import flops, program

# Read by libtpu when it is loaded. Removed afterwards: other libraries take these names for a TPU.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not query the metadata server for the type of TPU
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # required; the topology decides
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # take no lock that another process may need
}
# "Used 107.20G of 95.74G hbm."
_TOO_LARGE = re.compile(r"Used ([\d.]+)([KMG]) of [\d.]+[KMG] hbm")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": GIB}
# Optimizer steps of the run: constants of the learning rate schedule, nothing else.
_NUM_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The train step that is compiled.

    Attributes:
      config: options of the run.
      backbone: shape of its network.
      num_devices: of the mesh.
      rows, length: shape of a batch over all devices.
      trajectories, steps: upper bounds on the trajectories of a batch and the steps of one; little depends on them.
    """

    config: TrainConfig
    backbone: BackboneConfig
    num_devices: int
    rows: int
    length: int
    trajectories: int = 32
    steps: int = 64


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
      parameters, optimizer, frozen, batch: arguments of the step; the first two are updated in place, and frozen are
        the parameters that are not trained.
      gradients: of all trained parameters at once, as clipping by their norm needs them, with their sum under gradient
        accumulation.
      activations: what the forward pass keeps of every layer for the backward pass (:mod:`.activations`).
      temporaries: the rest of what the compiler plans: what a layer, the head, the embedding's gradient or the
        optimizer has in hand, and the program.
      total: what the compiler plans.
    """

    parameters: int
    optimizer: int
    gradients: int
    batch: int
    activations: int
    temporaries: int
    total: int
    frozen: int = 0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures of a step.

    Attributes:
      attention: the backend that the step was built with.
      memory: bytes by kind; where the compiler ran out of memory, total is its estimate of what is needed.
      refused: the compiler's message where it ran out of memory; else empty.
      seconds: of tracing and lowering, and of compiling.
      donated, aliased: arrays of the state, and those of them whose memory the new state takes over.
      attention_kernels: name -> how often a step runs it, on each device.
      collectives: by kind, on each device.
      model_flops: of the whole batch, all rows full of one causal sequence each: products that the model needs, forward
        and backward, nothing computed twice.
      trained: number of parameters that are trained, adapters among them.
    """

    attention: str
    device_kind: str
    mesh: dict[str, int]
    parameters: int
    memory: Memory
    refused: str
    seconds: tuple[float, float]
    donated: int
    aliased: int
    attention_kernels: dict[str, int]
    collectives: dict[str, Collective]
    model_flops: float
    tokens: int
    trained: int = 0


def open_mesh(accelerator: Gpu | Tpu, num_devices: int, mesh: str) -> Mesh:
    """The mesh of --mesh over absent devices.

    Raises:
      UserError: no compiler for them is installed, or no topology has num_devices of them.
    """
    arguments = accelerator.topology(num_devices)
    require_plugin(accelerator)
    with _environment(_WITHOUT_TPU if accelerator.platform == "tpu" else {}):
        described = topologies.get_topology_desc(platform=accelerator.platform, **arguments)
    return rules.make_mesh(DeviceConfig(mesh=mesh), described.devices)


def compile_step(planned: PlannedStep, accelerator: Gpu | Tpu) -> Compiled:
    """Compile the train step for the accelerator.

    Raises:
      UserError: as train: shapes that the mesh does not divide, a backend that cannot be used there.
    """
    built = build_for(planned, accelerator)
    mesh, tokens, accumulation = built.mesh, planned.rows * planned.length, planned.config.optimizer.accumulation
    batch = _abstract_batch(planned, built)
    state = built.abstract_state()
    started = time.perf_counter()
    lowered = built.train_step.lower(state, batch)
    traced = time.perf_counter()
    fixed = {
        "parameters": bytes_on_a_device(state.params),
        "optimizer": bytes_on_a_device((state.opt_state, state.step)),
        "frozen": bytes_on_a_device(built.frozen),
        "gradients": bytes_on_a_device(state.params) * (1 if accumulation == 1 else 2),
        "batch": bytes_on_a_device(batch),
    }
    compiled, total, refused = compile_lowered(lowered)
    seconds = (traced - started, time.perf_counter() - traced)
    text = CompiledText("" if compiled is None else _program_text(compiled, accelerator))
    net = built.network
    saved = activations.saved_bytes(
        built.partition, planned.config.loss, state.params, batch, mesh=mesh.shape, accumulation=accumulation
    )
    rest = max(total - sum(fixed.values()), 0)
    saved = min(saved, rest)  # where XLA keeps less than JAX gives it
    return Compiled(
        attention=net.attention,
        device_kind=mesh.devices.flat[0].device_kind,
        mesh=dict(mesh.shape),
        parameters=parameters.count(net),
        memory=Memory(**fixed, activations=saved, temporaries=rest - saved, total=total),
        refused=refused.splitlines()[0] if refused else "",
        seconds=seconds,
        donated=len(jax.tree.leaves(state)),
        aliased=text.aliased(),
        attention_kernels=text.attention_kernels(),
        collectives=text.collectives(),
        model_flops=flops.train_flops(net, tokens, tokens * (planned.length + 1) // 2, built.partition),
        tokens=tokens,
        trained=built.partition.parameters,
    )


def least_bytes(planned: PlannedStep, accelerator: Gpu | Tpu) -> int:
    """Bytes on each device of state and gradients alone: what does not fit here need not be compiled."""
    built = build_for(planned, accelerator)
    state = built.abstract_state()
    gradients = 1 if planned.config.optimizer.accumulation == 1 else 2
    return bytes_on_a_device((state, built.frozen)) + bytes_on_a_device(state.params) * gradients


def round_rows(rows: int, mesh: str, num_devices: int, accumulation: int) -> int:
    """The next number of rows that train can split over the devices of a mesh and the microbatches of a step."""
    sizes = rules.parse_mesh(mesh, num_devices)
    multiple = sizes["data"] * sizes["fsdp"] * accumulation
    return -(-rows // multiple) * multiple


def compile_lowered(lowered: Any) -> tuple[Any, int, str]:
    """A lowered program compiled, and the bytes that it takes on each device, its arguments among them.

    Where the compiler runs out of memory, the program is None, the bytes are the compiler's estimate, and its message
    comes third; otherwise the message is empty.
    """
    try:
        with _no_device_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        match = _TOO_LARGE.search(str(error))
        if match is None:
            raise
        return None, round(float(match[1]) * _UNITS[match[2]]), str(error)
    plan = compiled.memory_analysis()
    total = plan.argument_size_in_bytes + plan.temp_size_in_bytes + plan.generated_code_size_in_bytes
    return compiled, int(total + plan.output_size_in_bytes - plan.alias_size_in_bytes), ""


def _program_text(compiled: Any, accelerator: Gpu | Tpu) -> str:
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"JAX {jax.__version__} cannot read the output of the compiler for {accelerator.name}: their releases "
            f"differ; {INSTALL} installs the release that JAX requires"
        ) from error


def build_for(planned: PlannedStep, accelerator: Gpu | Tpu) -> program.Program:
    """The program of train on a mesh of the accelerator. UserError as in :func:`compile_step`."""
    mesh = open_mesh(accelerator, planned.num_devices, planned.config.device.mesh)
    network = assembly.define_network(planned.config, planned.backbone, mesh)
    return assembly.build_program(planned.config, network, _NUM_STEPS, mesh)


def _abstract_batch(planned: PlannedStep, built: program.Program) -> PackedBatch:
    shardings = built.batch_shardings

    def array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = array((planned.rows, planned.length), jnp.int32, shardings.tokens)
    places = array((planned.trajectories, planned.steps), jnp.int32, shardings.step_positions)
    labels = array((planned.trajectories, planned.steps), jnp.float32, shardings.labels)
    questions = array((planned.trajectories,), jnp.int32, shardings.labels)
    redundancy = labels if planned.config.loss.redundancy else None
    shape = (planned.rows, planned.length, planned.backbone.hidden_size)
    hidden = array(shape, jnp.dtype(built.network.dtype), shardings.hidden) if built.partition.cached else None
    distinct = DistinctSteps(places, labels, questions)
    return PackedBatch(rows, rows, rows, places, labels, distinct, redundancy, hidden)


def bytes_on_a_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of abstract arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the block, where they are not set."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextlib.contextmanager
def _no_device_cache() -> Iterator[None]:
    """Programs for absent devices are not cached: no run could use them, and loading one would fail."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
