"""A tiny real model, and batches put together by hand, so that nothing here depends on the packing code."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import ParamSpec, init_params, param_specs
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer, step
from cfprm_jax.training.optimizer import AdamW


def make_batch(seed: int = 0, rows: int = 8, length: int = 16, per_row: int = 2, steps: int = 3) -> PackedBatch:
    """per_row separate sequences of equal length in each row, some steps unlabelled, trajectories in shuffled order."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 64, (rows, length)).astype(np.int32)
    size = length // per_row
    column = np.arange(length, dtype=np.int32)
    positions = np.tile(column % size, (rows, 1))
    subtree_end = np.tile((column // size + 1) * size, (rows, 1)).astype(np.int32)
    starts = rng.permutation([r * length + s * size for r in range(rows) for s in range(per_row)])
    within = np.sort(np.stack([rng.permutation(size)[:steps] for _ in starts]), axis=1)
    labels = rng.choice([0.0, 1.0, np.nan], within.shape, p=[0.3, 0.5, 0.2]).astype(np.float32)
    return PackedBatch(tokens, positions, subtree_end, (starts[:, None] + within).astype(np.int32), labels)


TOY_SPECS = {
    "embedding": ParamSpec((64, 8), ("vocab", "embed"), "embedding", normal(0.5), "embedding"),
    "mix": {
        "kernel": ParamSpec((16, 8), ("mlp", "embed"), "matrix", normal(0.5), "mix"),
        "bias": ParamSpec((16,), ("mlp",), "bias", normal(0.5), "bias"),
    },
    "output": {"kernel": ParamSpec((1, 16), (None, "mlp"), "matrix", normal(0.5), "output")},
}


def toy(params, tokens, positions, subtree_end):
    """A network that compiles in no time, in which a token's output depends on those before it in its tree."""
    x = params["embedding"][tokens]
    column = jnp.arange(tokens.shape[1])
    sees = (column <= column[:, None]) & (column[:, None] < subtree_end[:, None, :])
    x = jnp.einsum("rij,rje->rie", sees / (1.0 + positions[:, None, :]), x)
    h = jnp.tanh(x @ params["mix"]["kernel"].T + params["mix"]["bias"])
    return (h @ params["output"]["kernel"].T)[..., 0]


class Setup:
    """Network, optimizer, shardings and jitted step on a mesh, as train.py puts them together."""

    def __init__(
        self,
        mesh: str = "data=1",
        devices: int = 1,
        loss: str = "bce",
        negative_weight: float = 1.0,
        num_steps: int = 10,
        network: str = "toy",
        **options,
    ):
        self.config = PRMConfig(
            BackboneConfig(
                vocab_size=64,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=4,
            )
        )
        # A large epsilon: AdamW's division by the root of a gradient near 0 would turn rounding into differences.
        self.optimizer = OptimizerConfig(**{"learning_rate": 1e-2, "adam_eps": 1e-2, **options})
        self.network = network
        self.specs = TOY_SPECS if network == "toy" else param_specs(self.config)
        self.mesh = rules.make_mesh(DeviceConfig(mesh=mesh), jax.devices()[:devices])
        self.param_shardings = rules.param_shardings(self.mesh, self.specs)
        self.schedule = optimizer.learning_rate_schedule(self.optimizer, num_steps)
        self.tx = AdamW(self.optimizer, self.schedule, self.specs)
        self.shardings = step.state_shardings(self.tx, self.param_shardings, self.mesh)
        self.batch_shardings = rules.batch_shardings(self.mesh)
        self.loss = losses.loss_function(LossConfig(loss=loss, negative_weight=negative_weight))
        self.pure = functools.partial(
            step.train_step,
            forward=self.forward,
            loss=self.loss,
            config=self.optimizer,
            tx=self.tx,
            schedule=self.schedule,
        )
        self.step = step.jit_train_step(lambda state, batch, _: self.pure(state, batch), self.shardings, self.mesh)

    def forward(self, params, tokens, positions, subtree_end):
        if self.network == "toy":
            return toy(params, tokens, positions, subtree_end)
        return prm.apply(
            self.config, params, tokens, positions, subtree_end, constrain=rules.constrain_activations(self.mesh)
        )

    def make_params(self, key: jax.Array):
        if self.network != "toy":
            return init_params(self.config, key)
        is_spec = functools.partial(lambda kind, x: isinstance(x, kind), ParamSpec)
        return jax.tree.map(
            lambda s: s.init(jax.random.fold_in(key, len(s.hf_name)), s.shape), self.specs, is_leaf=is_spec
        )

    def init(self, seed: int = 0) -> step.TrainState:
        params = jax.jit(self.make_params, out_shardings=self.param_shardings)(jax.random.key(seed))
        return step.init_state(params, self.tx, self.shardings)

    def put(self, batch: PackedBatch) -> PackedBatch:
        return rules.put_batch(batch, self.batch_shardings)

    def objective(self, params, batch: PackedBatch) -> jax.Array:
        total, count = self.loss(step.step_logits(self.forward, params, batch), batch.labels)
        return total / jnp.maximum(count, 1)


@pytest.fixture(scope="session")
def batch() -> Callable[..., PackedBatch]:
    return make_batch


@pytest.fixture(scope="session")
def setup() -> Callable[..., Setup]:
    """Setup, put together and compiled once for the same arguments."""
    return functools.cache(Setup)
