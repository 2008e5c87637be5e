"""The compiled parts of a run, put together from its options: everything but the weights and the data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from cfprm_jax import losses
from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models import parameters, prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.training import optimizer, sharding, step
from cfprm_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Program:
    """The steps of a run, jitted, and where their arguments live.

    Attributes:
      network: the PRM that is trained.
      specs: descriptions of its parameters, a nested dict.
      param_shardings: where each of them lives.
      tx: the optimizer.
      state_shardings: of a TrainState.
      batch_shardings: of a PackedBatch.
      train_step: (state, batch) -> (state, metrics); the state is donated.
      eval_step: (params, batch) -> (z [trajectories, steps], total, count).
    """

    network: PRMConfig
    specs: Any
    param_shardings: Any
    tx: optax.GradientTransformation
    state_shardings: TrainState
    batch_shardings: PackedBatch
    train_step: Callable[[TrainState, PackedBatch], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, PackedBatch], tuple[jax.Array, jax.Array, jax.Array]]

    def init_state(self, params: Any) -> TrainState:
        """The state before the first step, which takes these parameters over."""
        return step.init_state(params, self.tx, self.state_shardings)

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of a state: what a checkpoint is restored onto."""
        return step.abstract_state(self.tx, self.network, self.state_shardings)


def build(network: PRMConfig, loss: LossConfig, options: OptimizerConfig, num_steps: int, mesh: Mesh) -> Program:
    """The program of a run of num_steps optimizer steps.

    Raises:
      UserError: the mesh does not divide a parameter's dimension.
    """
    specs = parameters.param_specs(network)
    param_shardings = sharding.param_shardings(mesh, specs)
    schedule = optimizer.learning_rate_schedule(options, num_steps)
    tx = optimizer.make_optimizer(options, schedule, specs)
    forward = functools.partial(prm.apply, network, constrain=sharding.constrain_activations(mesh))
    loss_function = losses.loss_function(loss)
    state_shardings = step.state_shardings(tx, parameters.abstract_params(network), param_shardings, mesh)
    train_step = functools.partial(
        step.train_step, forward=forward, loss=loss_function, config=options, tx=tx, schedule=schedule
    )
    return Program(
        network=network,
        specs=specs,
        param_shardings=param_shardings,
        tx=tx,
        state_shardings=state_shardings,
        batch_shardings=sharding.batch_shardings(mesh),
        train_step=step.jit_train_step(train_step, state_shardings, mesh),
        eval_step=step.jit_eval_step(forward, loss_function, param_shardings, mesh),
    )
