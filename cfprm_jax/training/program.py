"""The compiled parts of a run, put together from its options: everything but the weights and the data."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from cfprm_jax import losses
from cfprm_jax.config import LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import parameters, prm
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.partition import Partition
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
      partition: which parameters are trained. Where some are frozen, :meth:`bind` gives them to the steps.
    """

    network: PRMConfig
    mesh: Mesh
    specs: Any
    param_shardings: Any
    tx: AdamW
    state_shardings: TrainState
    batch_shardings: PackedBatch
    train_step: step.Step
    eval_step: step.Step
    partition: Partition

    @property
    def frozen(self) -> Any:
        """The frozen parameters of the steps, a nested dict; abstract until they are bound."""
        return self.train_step.frozen

    def bind(self, frozen: Any) -> Program:
        """The program whose steps have these frozen parameters."""
        return dataclasses.replace(self, train_step=self.train_step.bind(frozen), eval_step=self.eval_step.bind(frozen))

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
            f"--optimizer=adamw_compact computes with bfloat16 weights, but --dtype is {dtype}; "
            "choose --optimizer=adamw"
        )


def build(
    network: PRMConfig,
    loss: LossConfig,
    options: OptimizerConfig,
    num_steps: int,
    mesh: Mesh,
    *,
    adapters: Lora | None = None,
    deterministic: bool = False,
    frozen_layers: int = 0,
    cached: bool = False,
) -> Program:
    """The program of a run of num_steps optimizer steps.

    Args:
      adapters, frozen_layers, cached: what is trained, see :class:`~cfprm_jax.models.partition.Partition`.
      deterministic: compiled to give the same bits every time (:mod:`cfprm_jax.runtime.determinism`).

    Raises:
      UserError: the mesh does not divide a parameter's dimension, more layers are frozen than there are, or
        --optimizer=adamw_compact with float32 compute or adapters.
    """
    refuse_optimizer(options.optimizer, network.dtype, adapters)
    partition = Partition(network, frozen_layers, adapters, cached)
    specs = partition.trainable
    param_shardings = rules.param_shardings(mesh, specs)
    # What is frozen needs no more precision than it is computed in.
    frozen = parameters.abstract_tree(partition.frozen, network.dtype, rules.param_shardings(mesh, partition.frozen))
    schedule = optimizer.learning_rate_schedule(options, num_steps)
    tx = AdamW(options, schedule, specs)
    forward: step.Forward = functools.partial(prm.apply, network, constrain=rules.constrain_activations(mesh))
    loss_function = losses.loss_function(loss)
    state_shardings = step.state_shardings(tx, param_shardings, mesh)
    compiler_options = determinism.compiler_options(deterministic, mesh.devices.flat[0].platform)

    def train_step(state: TrainState, batch: PackedBatch, frozen: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        own = step.bound(forward, partition.join, frozen)
        return step.train_step(state, batch, forward=own, loss=loss_function, config=options, tx=tx, schedule=schedule)

    return Program(
        network=network,
        mesh=mesh,
        specs=specs,
        param_shardings=param_shardings,
        tx=tx,
        state_shardings=state_shardings,
        batch_shardings=rules.batch_shardings(mesh),
        train_step=step.jit_train_step(train_step, state_shardings, mesh, frozen, compiler_options),
        eval_step=step.jit_eval_step(
            forward,
            loss_function,
            param_shardings,
            mesh,
            frozen=frozen,
            compiler_options=compiler_options,
            join=partition.join,
        ),
        partition=partition,
    )
