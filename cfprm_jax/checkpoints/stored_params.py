"""Restoring of the parameters of a stored state without the optimizer's, verified by their checksums.

A state of --optimizer=adamw_compact has bfloat16 parameters and the rest of their masters' bits in the optimizer's
state: for float32 parameters both are read, and joined exactly.

Checksums are of arrays as they were stored, so arrays are read in their stored types, compared, and then cast. They are
read some at a time, so that a cast needs little more memory than its result.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from cfprm_jax.checkpoints import orbax_files
from cfprm_jax.models.split_float32 import join_float32

# Arrays are read together up to this many bytes; a larger one is read alone.
_TOGETHER = 1 << 30

_join = jax.jit(join_float32)


class _Param(NamedTuple):
    """One parameter: its path in the tree, what is stored, and the requested array."""

    path: tuple[str, ...]
    stored: Any  # of the parameter, as Orbax describes it
    halved: bool  # its float32 master is the parameter and 16 bits of the optimizer's state
    abstract: jax.ShapeDtypeStruct

    @property
    def nbytes(self) -> int:
        size = math.prod(self.abstract.shape)
        return size * (jnp.dtype(self.stored.dtype).itemsize + 2 * self.halved)


def read(checkpoint: pathlib.Path, params: Any, verify: Callable[[Any], None]) -> Any:
    """The parameters of a checkpoint, cast and laid out as the abstract ones.

    Args:
      params: jax.ShapeDtypeStruct with shardings, a nested dict of the stored structure.
      verify: raises for a part of the state that is not what was saved.

    Raises:
      DamagedError: files are missing or damaged, or the arrays differ from params in name or shape; all differences are
        listed.
    """
    directory = epath.Path(checkpoint / "state")
    # The item's handler alone: a manager also needs the items that are not read here.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler, orbax_files.damaged(checkpoint):
        tree = handler.metadata(directory).tree
        orbax_files.require_equal(str(checkpoint), _shapes(params), _shapes(tree["params"]))
        out: dict[str, Any] = {}
        for group in _groups(list(_walk(params, tree["params"], tree.get("opt_state", {})))):
            item: dict[str, Any] = {}
            for param in group:
                _put(item, ("params", *param.path), _as_stored(param, param.stored.dtype))
                if param.halved:
                    _put(item, ("opt_state", *param.path, "low"), _as_stored(param, jnp.int16))
            arguments = ocp.args.PyTreeRestore(
                item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
            )
            restored = handler.restore(directory, args=arguments)
            verify(restored)
            for param in group:
                value = _take(restored, ("params", *param.path))
                if param.halved:
                    value = _join(value, _take(restored, ("opt_state", *param.path, "low")))
                _put(out, param.path, _cast(value, param.abstract))
                del value
        return out


def _shapes(tree: Any) -> dict[str, str]:
    return {name: str(list(leaf.shape)) for name, leaf in ocp.tree.to_flat_dict(tree, sep="/").items()}


def _walk(params: Any, stored: Any, slot: Any, path: tuple[str, ...] = ()) -> Iterator[_Param]:
    for key, abstract in params.items():
        inner = slot.get(key, {}) if isinstance(slot, Mapping) else {}
        if isinstance(abstract, Mapping):
            yield from _walk(abstract, stored[key], inner, (*path, key))
        else:
            halves = abstract.dtype == jnp.float32 and stored[key].dtype == jnp.bfloat16
            yield _Param((*path, key), stored[key], halves and "low" in inner, abstract)


def _groups(params: list[_Param]) -> Iterator[list[_Param]]:
    group: list[_Param] = []
    for one in params:
        if group and sum(other.nbytes for other in group) + one.nbytes > _TOGETHER:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _as_stored(param: _Param, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(param.abstract.shape, dtype, sharding=param.abstract.sharding)


def _cast(value: jax.Array, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    if value.dtype == abstract.dtype:
        return value
    return _casting(jnp.dtype(abstract.dtype), abstract.sharding)(value)


@functools.cache
def _casting(dtype: jnp.dtype, sharding: jax.sharding.Sharding) -> Any:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _take(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Remove a value, so that it is gone when it has been used."""
    for key in path[:-1]:
        tree = tree[key]
    return tree.pop(path[-1])
