"""The compiled parts of a run, put together from its options: everything but the weights and the data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from cfprm_jax import losses
from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import lora, parameters, prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.runtime import determinism
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer, step
from cfprm_jax.training.optimizer import AdamW
from cfprm_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps of a run, jitted, and where their arguments live.

    Attributes:
      network: the PRM that is trained.
      mesh: of the devices that it is trained on.
      specs: descriptions of the parameters that are trained, a nested dict.
      param_shardings: where each of them lives.
      tx: the optimizer.
      state_shardings: of a TrainState.
      batch_shardings: of a PackedBatch.
      train_step: (state, batch) -> (state, metrics); the state is donated.
      eval_step: (params, batch) -> (z [trajectories, steps], total, count).

    Of a run with adapters the steps take the frozen parameters as a third argument, until :meth:`bind` has given them.
    """

    network: PRMConfig
    mesh: Mesh
    specs: Any
    param_shardings: Any
    tx: AdamW
    state_shardings: TrainState
    batch_shardings: PackedBatch
    train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]

    def bind(self, frozen: Any) -> Program:
        """The program whose steps have their frozen parameters, which are never donated."""
        return dataclasses.replace(
            self,
            train_step=lambda state, batch: self.train_step(state, batch, frozen),
            eval_step=lambda params, batch: self.eval_step(params, batch, frozen),
        )

    def init_state(self, params: Any) -> TrainState:
        """The state before the first step, of these float32 parameters."""
        return step.init_state(params, self.tx, self.state_shardings)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of a state: what a checkpoint is restored onto."""
        return step.abstract_state(self.tx, self.specs, self.state_shardings)


def refuse_optimizer(optimizer: str, dtype: str, adapters: Lora | None) -> None:
    """UserError for an optimizer that does not go with the type of compute, or with adapters (None: there are none)."""
    if optimizer != "adamw_compact":
        return
    if adapters is not None:
        raise UserError("--optimizer=adamw_compact saves nothing beside --lora_rank: choose --optimizer=adamw")
    if dtype != "bfloat16":
        raise UserError(
            f"--optimizer=adamw_compact computes with bfloat16 weights, and --dtype={dtype} asks for more; "
            "choose --optimizer=adamw"
        )


def build(
    network: PRMConfig,
    loss: LossConfig,
    options: OptimizerConfig,
    num_steps: int,
    mesh: Mesh,
    adapters: Lora | None = None,
    deterministic: bool = False,
) -> Program:
    """The program of a run of num_steps optimizer steps, which trains the whole network or adapters and head.

    Args:
      deterministic: compiled to give the same bits every time (:mod:`cfprm_jax.runtime.determinism`).

    Raises:
      UserError: the mesh does not divide a parameter's dimension, or --optimizer=adamw_compact with float32 compute or
        adapters.
    """
    refuse_optimizer(options.optimizer, network.dtype, adapters)
    specs = parameters.param_specs(network) if adapters is None else lora.trainable_specs(network, adapters)
    param_shardings = rules.param_shardings(mesh, specs)
    schedule = optimizer.learning_rate_schedule(options, num_steps)
    tx = AdamW(options, schedule, specs)
    forward: step.Forward = functools.partial(prm.apply, network, constrain=rules.constrain_activations(mesh))
    frozen_shardings = None
    if adapters is not None:
        forward = functools.partial(_adapted, forward, adapters.scale)
        frozen_shardings = rules.param_shardings(mesh, lora.frozen_specs(network))
    loss_function = losses.loss_function(loss)
    state_shardings = step.state_shardings(tx, param_shardings, mesh)
    compiler_options = determinism.compiler_options(deterministic, mesh.devices.flat[0].platform)

    def train_step(state: TrainState, batch: PackedBatch, *frozen: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        own = functools.partial(_with_frozen, forward, *frozen) if frozen else forward
        return step.train_step(state, batch, forward=own, loss=loss_function, config=options, tx=tx, schedule=schedule)

    return Program(
        network=network,
        mesh=mesh,
        specs=specs,
        param_shardings=param_shardings,
        tx=tx,
        state_shardings=state_shardings,
        batch_shardings=rules.batch_shardings(mesh),
        train_step=step.jit_train_step(train_step, state_shardings, mesh, frozen_shardings, compiler_options),
        eval_step=step.jit_eval_step(forward, loss_function, param_shardings, mesh, frozen_shardings, compiler_options),
    )


def _adapted(forward: step.Forward, scale: float, parts: tuple[Any, Any], *inputs: Any) -> Any:
    """forward of (frozen, trainable)."""
    return forward(lora.combine(*parts, scale), *inputs)


def _with_frozen(forward: step.Forward, frozen: Any, params: Any, *inputs: Any) -> Any:
    return forward((frozen, params), *inputs)
