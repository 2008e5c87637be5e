"""AdamW, its learning rate over the run, and clipping by the global norm.

The arithmetic is float32 whatever the gradients are, on float32 masters: at the learning rates of fine-tuning (2e-6) an
update is far below half a unit in the last place of a bfloat16 weight, so bfloat16 parameters would not move at all.
How masters and moments are held between steps is :mod:`cfprm_jax.training.slots`. Each parameter, and each layer of a
large one, is updated in its own memory, so no second copy of anything exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cfprm_jax.config import OptimizerConfig
from cfprm_jax.huggingface.to_devices import Conversion
from cfprm_jax.models.parameters import ParamSpec, walk
from cfprm_jax.training import slots
from cfprm_jax.training.slots import Compact, Moments, Plain, RoundingKey

Schedule = Callable[[Any], Any]
"""Optimizer steps done -> learning rate of the next."""

# A layer with at least this number of parameters is updated in a loop iteration of its own, which bounds the float32
# temporaries; below that the loop costs more than they do.
_LARGE_LAYER = 1 << 20


class Optimizer(Protocol):
    """The interface of an optimizer to the train step. Trees are nested dicts of the parameters' structure."""

    def init(self, masters: Any) -> tuple[Any, Any]:
        """Float32 parameters -> (params, opt_state) before the first step."""

    def update(self, grads: Any, scale: Any, params: Any, opt_state: Any, step: Any) -> tuple[Any, Any]:
        """The next (params, opt_state), for gradients that are to be multiplied by scale; step are those done."""

    def shardings(self, params: Any) -> Any:
        """Where opt_state lives, given where the parameters do."""


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> Schedule:
    """The rate of optimizer step k = 0 .. num_steps - 1, exact to the length of the run.

    With W = round(warmup_fraction * num_steps): (k + 1) / W of the peak for k < W, so that already the first step moves
    something; then from the peak at k = W down to final_rate_fraction of it at k = num_steps, along a cosine or a line,
    or not at all (constant).
    """
    warmup = round(config.warmup_fraction * num_steps)
    final = config.final_rate_fraction

    def rate(step: Any) -> Any:
        k = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((k - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
        left = {
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
            "linear": 1.0 - progress,
            "constant": jnp.ones_like(progress),
        }[config.decay]
        decayed = left if config.decay == "constant" else final + (1.0 - final) * left
        return config.learning_rate * jnp.where(k < warmup, (k + 1.0) / max(warmup, 1), decayed)

    return rate


def global_norm(grads: Any) -> Float[Array, ""]:
    """The Euclidean norm of all gradients together, summed in float32."""
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(squares, start=jnp.float32(0.0)))


def clip_scale(norm: Float[Array, ""], max_norm: float) -> Float[Array, ""]:
    """What brings gradients of this global norm down to max_norm: at most 1; max_norm 0 is off."""
    if not max_norm:
        return jnp.float32(1.0)
    return jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))


def add_gradients(total: Any, grads: Any, number: Any) -> Any:
    """total + grads, leaf by leaf in their types (nested dicts).

    A sum in bfloat16, which costs half of what one in float32 does, is rounded stochastically: without bias, and after
    a few parts within the rounding of the gradients themselves.

    Args:
      number: int32, of the sum: another one for each sum of a run.
    """

    def add(name: str, total: Any, grad: Any) -> Any:
        if isinstance(total, Mapping):
            return {key: add(f"{name}.{key}", total[key], grad[key]) for key in total}
        if total.dtype != jnp.bfloat16:
            return total + grad
        exact = total.astype(jnp.float32) + grad.astype(jnp.float32)
        return slots.stochastic_round(exact, RoundingKey(number, slots.element_hash(name, total.shape)))

    return add("gradients", total, grads)


class AdamW:
    """AdamW (Loshchilov and Hutter 2019): decoupled decay, of matrices only, not embeddings, biases and norms.

    Attributes:
      formats: name of a parameter -> how it is held.
    """

    def __init__(self, config: OptimizerConfig, schedule: Schedule, specs: Any):
        """The optimizer of parameters with these specs (a nested dict of their structure)."""
        self._config, self._schedule, self._specs = config, schedule, specs
        compact = Compact.of(config.adam_b1, config.adam_b2)
        self.formats: dict[str, Plain | Compact] = {
            name: compact if config.optimizer == "adamw_compact" and _is_large(spec) else Plain()
            for name, spec in walk(specs)
        }

    def init(self, masters: Any) -> tuple[Any, Any]:
        held = self._map(lambda name, spec, master: self.formats[name].init(master), masters)
        return params_of(held), slots_of(held)

    def conversions(self, params: Any) -> Any:
        """What :meth:`init` does, a parameter at a time: a nested dict of Conversion from master to (param, slot).

        Args:
          params: where the parameters live.
        """
        return self._map(
            lambda name, spec, sharding: Conversion(
                self.formats[name].init, (sharding, self.formats[name].shardings(sharding))
            ),
            params,
        )

    def masters(self, params: Any, opt_state: Any) -> Any:
        """The float32 parameters."""
        return self._map(lambda name, spec, *held: self.formats[name].master(*held), params, opt_state)

    def shardings(self, params: Any) -> Any:
        return self._map(lambda name, spec, sharding: self.formats[name].shardings(sharding), params)

    def update(self, grads: Any, scale: Any, params: Any, opt_state: Any, step: Any) -> tuple[Any, Any]:
        new = functools.partial(self._update_one, scale=scale, step=step)
        updated = self._map(new, grads, params, opt_state)
        return params_of(updated), slots_of(updated)

    def _update_one(
        self, name: str, spec: ParamSpec, grad: Any, param: Any, slot: Any, *, scale: Any, step: Any
    ) -> tuple[Any, Any]:
        """The next (param, slot) of one parameter."""
        held = self.formats[name]

        def part(grad: Any, param: Any, slot: Any, layer: Any) -> tuple[Any, Any]:
            moments = self._adamw(held.load(param, slot), grad.astype(jnp.float32) * scale, spec.kind == "matrix", step)
            return held.store(moments, RoundingKey(step, slots.element_hash(name, grad.shape, layer, spec.first_layer)))

        if not spec.stacked or grad[0].size < _LARGE_LAYER:
            return part(grad, param, slot, None)

        def one_layer(layer: Any, carry: Any) -> Any:
            # In place: XLA reads a layer of the carry and writes it back, where a scan would fill a second array.
            own_grad, own_param, own_slot = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), (grad, *carry)
            )
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
            return jax.tree.map(put, carry, part(own_grad, own_param, own_slot, layer))

        return jax.lax.fori_loop(0, grad.shape[0], one_layer, (param, slot))

    def _adamw(self, old: Moments, grad: Any, decays: bool, step: Any) -> Moments:
        """One step, all float32."""
        b1, b2, eps = self._config.adam_b1, self._config.adam_b2, self._config.adam_eps
        first = b1 * old.first + (1.0 - b1) * grad
        second = b2 * old.second + (1.0 - b2) * jnp.square(grad)
        done = jnp.asarray(step + 1, jnp.float32)
        update = (first / (1.0 - b1**done)) / (jnp.sqrt(second / (1.0 - b2**done)) + eps)
        if decays and self._config.weight_decay:
            update += self._config.weight_decay * old.master
        return Moments(old.master - self._schedule(step) * update, first, second)

    def _map(self, function: Callable[..., Any], *trees: Any) -> Any:
        """function(name, spec, leaf of each tree, ...) of every parameter."""

        def over(specs: Any, prefix: str, *trees: Any) -> Any:
            if isinstance(specs, Mapping):
                return {key: over(specs[key], f"{prefix}{key}.", *(tree[key] for tree in trees)) for key in specs}
            return function(prefix.removesuffix("."), specs, *trees)

        return over(self._specs, "", *trees)


def params_of(tree: Any) -> Any:
    """The params of a tree whose leaves are pairs (param, slot)."""
    return jax.tree.map(lambda pair: pair[0], tree, is_leaf=_is_pair)


def slots_of(tree: Any) -> Any:
    """The slots of a tree whose leaves are pairs (param, slot): the optimizer's state."""
    return jax.tree.map(lambda pair: pair[1], tree, is_leaf=_is_pair)


def _is_pair(x: Any) -> bool:
    return type(x) is tuple


def _is_large(spec: ParamSpec) -> bool:
    """Whether holding it in fewer bytes is worth anything: matrices and embeddings that have the run's type."""
    return spec.kind in ("matrix", "embedding") and spec.dtype is None
