"""The state before the first step, made without a second copy of the weights on the devices.

A 7B state of --optimizer=adamw_compact is 40 GiB, and 66 with all the float32 masters from which it is made beside it.
So each parameter takes the form in which the optimizer holds it as it is loaded, a layer at a time.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from cfprm_jax.huggingface import loading
from cfprm_jax.models import lora, parameters
from cfprm_jax.training import optimizer
from cfprm_jax.training.program import Program
from cfprm_jax.training.step import TrainState


def create(built: Program, directory: pathlib.Path, init: str, seed: int) -> tuple[TrainState, str]:
    """The state, in its shardings, and a phrase for the log that names the source of the weights.

    Args:
      directory: of the weights, a Hugging Face directory.
      init: "pretrained" for those, "random" for fresh ones.
      seed: of whatever is fresh.

    Raises:
      UserError: the directory does not hold the network's weights.
    """
    key = jax.random.key(seed)
    if init == "random":
        return random_program(built)(key), f"random, seed {seed}"
    fresh: dict[str, Any] = {}
    loaded = {"specs": built.specs, "shardings": built.param_shardings}
    conversions = built.tx.conversions(built.param_shardings)
    if built.partition.lora is not None:
        adapters = adapters_program(built)(key)
        fresh = jax.tree.map(lambda value, convert: convert(value), adapters, {"backbone": conversions["backbone"]})
        loaded = {name: {"head": tree["head"]} for name, tree in loaded.items()}
        conversions = {"head": conversions["head"]}
    held, report = loading.load_params(
        directory, built.network, dtype=jnp.float32, head_key=key, conversions=conversions, **loaded
    )
    held = {**fresh, **held}
    step = jax.device_put(jnp.zeros((), jnp.int32), built.state_shardings.step)
    return TrainState(optimizer.params_of(held), optimizer.slots_of(held), step), str(report)


def adapters_program(built: Program) -> Any:
    """key -> fresh float32 adapters of a program that trains such, {"backbone": ...}, jitted."""
    shardings = {"backbone": built.param_shardings["backbone"]}
    return jax.jit(lambda key: lora.init_adapters(built.specs, key), out_shardings=shardings)


def random_program(built: Program) -> Any:
    """key -> the state of a fresh network, jitted: in one program, in which masters are not kept either."""

    def fresh(key: jax.Array) -> TrainState:
        params, opt_state = built.tx.init(parameters.init_params(built.network, key))
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))

    return jax.jit(fresh, out_shardings=built.state_shardings)
