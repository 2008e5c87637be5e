"""Memory before the first step: the programs that create the state, compiled for the accelerator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax.huggingface.to_devices import Conversion, load_program
from cfprm_jax.models.parameters import lookup, param_dtype, walk
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
    key = jax.eval_shape(lambda: jax.random.key(0))
    _, total, _ = ahead.compile_lowered(initial_state.random_program(built).lower(key))
    return Start(total, "random initialisation")


def _loading(built: Program) -> Start:
    """One parameter after another, beside those that are there already: the frozen ones, then what is trained."""
    conversions = built.tx.conversions(built.param_shardings)
    peak, held = Start(0, ""), 0
    known: dict[Any, int] = {}  # parameters of one shape have one program
    trained = {name for name, _ in walk(built.specs)}
    for name, spec in [*walk(built.partition.frozen), *walk(built.specs)]:
        if name in trained:
            sharding, conversion = lookup(built.param_shardings, name), lookup(conversions, name)
            dtype, held_as = np.dtype(param_dtype(spec, jnp.float32)), built.tx.formats[name]
        else:
            leaf = lookup(built.frozen, name)
            sharding, dtype, held_as = leaf.sharding, leaf.dtype, None
            conversion = Conversion(lambda x: x, sharding)
        alike = (spec.shape, spec.stacked, sharding, held_as)
        if alike not in known:
            program, arguments, under_way = load_program(spec, dtype, sharding, conversion)
            _, own, _ = ahead.compile_lowered(program.lower(*arguments))
            known[alike] = own + under_way * ahead.bytes_on_a_device(arguments[-2:-1])
        total = held + known[alike]
        if total > peak.total:
            peak = Start(total, f"loading {name}")
        made = jax.eval_shape(conversion.function, jax.ShapeDtypeStruct(spec.shape, dtype))
        held += ahead.bytes_on_a_device(
            jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), made, conversion.shardings)
        )
    return peak
