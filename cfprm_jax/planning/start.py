"""Memory before the first step: the programs that create the state, compiled for the accelerator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax.huggingface.to_devices import Conversion, load_program
from cfprm_jax.models.parameters import ParamSpec, lookup, param_dtype, walk
from cfprm_jax.planning import ahead
from cfprm_jax.planning.accelerators import Gpu, Tpu
from cfprm_jax.training import initial_state
from cfprm_jax.training.program import Program


@dataclasses.dataclass(frozen=True)
class Start:
    """The peak of memory while the state is created.

    Attributes:
      total: bytes on each device.
      what: the operation at the peak.
    """

    total: int
    what: str


def compile_start(planned: ahead.PlannedStep, accelerator: Gpu | Tpu) -> Start:
    """Compile the programs that create the state, by --init from files or from a seed.

    Raises:
      UserError: as :func:`~cfprm_jax.planning.ahead.compile_step`.
    """
    built = ahead.build_for(planned, accelerator)
    return _random(built) if planned.config.model.init == "random" else _loading(built)


def _random(built: Program) -> Start:
    _, total, _ = ahead.compile_lowered(initial_state.random_program(built).lower(_key()))
    return Start(total, "random initialisation")


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


@dataclasses.dataclass
class _Peak:
    """The peak so far, and the bytes that stay."""

    peak: Start = Start(0, "")
    held: int = 0

    def add(self, most: int, stays: int, what: str) -> None:
        """An operation that takes `most` bytes beside those that are there, of which some stay."""
        if self.held + most > self.peak.total:
            self.peak = Start(self.held + most, what)
        self.held += stays


def _loading(built: Program) -> Start:
    """One parameter after another: the frozen ones, then what is trained; all fresh adapters at once between them."""
    conversions = built.tx.conversions(built.param_shardings)
    so_far = _Peak()
    known: dict[Any, int] = {}  # parameters of one shape have one program

    def load(name: str, spec: ParamSpec, dtype: Any, conversion: Conversion, held_as: Any) -> None:
        sharding = conversion.shardings if held_as is None else lookup(built.param_shardings, name)
        alike = (spec.shape, spec.stacked, sharding, held_as)
        if alike not in known:
            program, arguments, under_way = load_program(spec, dtype, sharding, conversion)
            _, own, _ = ahead.compile_lowered(program.lower(*arguments))
            known[alike] = own + under_way * ahead.bytes_on_a_device(arguments[-2:-1])
        so_far.add(known[alike], _converted(spec, dtype, conversion), f"loading {name}")

    for name, spec in walk(built.partition.frozen):
        leaf = lookup(built.frozen, name)
        load(name, spec, leaf.dtype, Conversion(lambda x: x, leaf.sharding), None)
    loaded = built.specs
    if built.partition.lora is not None:
        _add_adapters(built, conversions["backbone"], so_far)
        loaded = {"head": built.specs["head"]}
    for name, spec in walk(loaded):
        dtype = np.dtype(param_dtype(spec, jnp.float32))
        load(name, spec, dtype, lookup(conversions, name), built.tx.formats[name])
    return so_far.peak


def _add_adapters(built: Program, conversions: Any, so_far: _Peak) -> None:
    """They are made in float32, and stay so while each takes the form in which the optimizer holds it."""
    program = initial_state.adapters_program(built)
    _, made, _ = ahead.compile_lowered(program.lower(_key()))
    names = list(walk(built.specs["backbone"]))
    stays = sum(_converted(spec, np.dtype(np.float32), lookup(conversions, name)) for name, spec in names)
    shardings = built.param_shardings["backbone"]
    masters = [jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=lookup(shardings, name)) for name, spec in names]
    so_far.add(max(made, ahead.bytes_on_a_device(masters) + stays), stays, "making adapters")


def _converted(spec: ParamSpec, dtype: Any, conversion: Conversion) -> int:
    """Bytes on a device of a parameter in the form in which it is held."""
    made = jax.eval_shape(conversion.function, jax.ShapeDtypeStruct(spec.shape, dtype))
    leaves = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), made, conversion.shardings)
    return ahead.bytes_on_a_device(leaves)
