"""The parameters of a stored state without the rest of it; float32 ones also where it holds them in two halves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from cfprm_jax.training import slots


def read(handler: ocp.PyTreeCheckpointHandler, directory: epath.Path, tree: Any, params: Any) -> Any:
    """The parameters cast and laid out as the abstract ones.

    A state of --optimizer=adamw_compact has bfloat16 parameters and the rest of their masters' bits in the optimizer's
    state: where float32 is wanted, both are read, and put together exactly.

    Args:
      tree: what handler.metadata says is stored.
      params: jax.ShapeDtypeStruct with shardings, a nested dict of the stored structure.
    """
    lower = _lower_halves(params, tree["params"], tree.get("opt_state", {}))
    upper = _upper_halves(params, lower)
    item = {"params": upper, **({"opt_state": lower} if lower else {})}
    arguments = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    restored = handler.restore(directory, args=arguments)
    return _joined(restored["params"], restored.get("opt_state", {}))


def _lower_halves(params: Any, stored: Any, slot: Any) -> dict[str, Any]:
    """{..., "low": int16} of every parameter that is wanted in float32 and stored in halves; empty without any."""
    out: dict[str, Any] = {}
    for key, wanted in params.items():
        if isinstance(wanted, Mapping):
            inner = _lower_halves(wanted, stored[key], slot[key])
            out |= {key: inner} if inner else {}
        elif wanted.dtype == jnp.float32 and stored[key].dtype == jnp.bfloat16 and "low" in slot[key]:
            out[key] = {"low": jax.ShapeDtypeStruct(wanted.shape, jnp.int16, sharding=wanted.sharding)}
    return out


def _upper_halves(params: Any, lower: Mapping[str, Any]) -> dict[str, Any]:
    """The abstract parameters, those with a lower half in bfloat16."""
    out: dict[str, Any] = {}
    for key, wanted in params.items():
        if isinstance(wanted, Mapping):
            out[key] = _upper_halves(wanted, lower.get(key, {}))
        elif key in lower:
            out[key] = jax.ShapeDtypeStruct(wanted.shape, jnp.bfloat16, sharding=wanted.sharding)
        else:
            out[key] = wanted
    return out


def _joined(params: Any, lower: Mapping[str, Any]) -> dict[str, Any]:
    join = jax.jit(slots.join_float32)
    out: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            out[key] = _joined(value, lower.get(key, {}))
        else:
            out[key] = join(value, lower[key]["low"]) if key in lower else value
    return out
