"""Frozen layers: what is trained moves as it would in a step of everything whose other gradients are 0."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import parameters, prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import param_specs, walk
from cfprm_jax.models.partition import Partition, trunk_of, without_trunk
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer, program, step
from cfprm_jax.training.optimizer import AdamW

pytestmark = pytest.mark.quick_compile

NET = PRMConfig(BackboneConfig(64, 16, 32, 4, 4, 2, 4), dtype="float32", attention="xla")
LAYERS = 4
LOSS = losses.loss_function(LossConfig(loss="bce"))


def divided(params: Any, layers: int) -> tuple[Any, Any]:
    """(frozen, trainable) of whole parameters."""
    return {"trunk": trunk_of(params, layers)}, without_trunk(params, layers)


def steps_of(partition: Partition, options: OptimizerConfig, masked: int = 0) -> tuple[AdamW, Any]:
    """The optimizer, and a jitted step of (state, batch, frozen).

    Args:
      masked: gradients of the embedding and of this number of layers count as 0.
    """
    schedule = optimizer.learning_rate_schedule(options, 10)
    tx: Any = AdamW(options, schedule, partition.trainable)
    if masked:
        tx = Masked(tx, masked)
    forward = functools.partial(prm.apply, partition.network)

    def one(state: step.TrainState, batch: PackedBatch, frozen: Any) -> Any:
        own = step.bound(forward, partition.join, frozen)
        return step.train_step(state, batch, forward=own, loss=LOSS, config=options, tx=tx, schedule=schedule)

    return tx, jax.jit(one, compiler_options={"xla_backend_optimization_level": 0})


class Masked:
    """An optimizer of everything that gets gradients of 0 for the embedding and the first layers."""

    def __init__(self, tx: AdamW, layers: int) -> None:
        self._tx, self._layers, self.init = tx, layers, tx.init

    def update(self, grads: Any, scale: Any, params: Any, opt_state: Any, done: Any) -> Any:
        backbone = grads["backbone"]
        own = {
            **grads,
            "backbone": {
                **backbone,
                "embedding": jnp.zeros_like(backbone["embedding"]),
                "layers": jax.tree.map(lambda g: g.at[: self._layers].set(0), backbone["layers"]),
            },
        }
        return self._tx.update(own, scale, params, opt_state, done)


@pytest.mark.parametrize("name", ["adamw", "adamw_compact"])
def test_a_step_is_that_of_everything_with_masked_gradients(name, batch, random_params):
    """Three steps in float32, the stochastic rounding of the compact state included; nothing is clipped."""
    options = OptimizerConfig(optimizer=name, learning_rate=1e-2, adam_eps=1e-3, max_grad_norm=0.0)
    whole, frozen_layers = random_params(NET), 3
    frozen, trainable = divided(whole, frozen_layers)
    masked, reference = steps_of(Partition(NET), options, frozen_layers)
    tx, own = steps_of(Partition(NET, frozen_layers), options)
    expected, state = (step.TrainState(*made.init(p), jnp.int32(0)) for made, p in ((masked, whole), (tx, trainable)))
    # What the network computes with: the compact optimizer's weights are bfloat16.
    frozen = jax.tree.map(lambda held, like: held.astype(like.dtype), frozen, divided(expected.params, 3)[0])
    for seed in range(3):
        rows = batch(seed)
        expected, theirs = reference(expected, rows, {})
        state, ours = own(state, rows, frozen)
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-6)
        assert ours["grad_norm"] < theirs["grad_norm"]
    found = dict(walk(state.params))
    for path, leaf in walk(without_trunk(expected.params, frozen_layers)):
        rounding = 2e-2 if name == "adamw_compact" else 1e-5
        np.testing.assert_allclose(*map(np.float32, (found[path], leaf)), rtol=rounding, atol=rounding, err_msg=path)
        assert not np.array_equal(found[path], dict(walk(trainable))[path]), path


def test_nothing_is_held_or_computed_for_frozen_layers():
    """No slots, no gradients, and a third of the arithmetic of a layer, as XLA counts it with its loops unrolled."""
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    unrolled = functools.partial(jax.lax.scan, unroll=True)
    rows = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    places, labels = (jax.ShapeDtypeStruct((8, 3), dtype) for dtype in (jnp.int32, jnp.float32))
    batch = PackedBatch(rows, rows, rows, places, labels)
    network = PRMConfig(BackboneConfig(64, 64, 128, LAYERS, 4, 2, 16), dtype="float32", attention="xla", remat="none")
    counted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "scan", unrolled)
        for frozen in (0, 3, LAYERS):
            built = program.build(network, LossConfig(), OptimizerConfig(), 10, mesh, frozen_layers=frozen)
            state = built.abstract_state()
            lowered = built.train_step.lower(state, batch)
            counted[frozen] = lowered.cost_analysis()["flops"]
            names = {name for name, _ in walk(state.params)}
            assert len(jax.tree.leaves(state.opt_state)) == 2 * len(names)
            held = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            assert held == built.partition.parameters
            if frozen == LAYERS:
                assert names == {"head.output.kernel", "head.output.bias"}
            elif frozen:
                shapes = {leaf.shape[0] for name, leaf in walk(state.params) if ".layers." in name}
                assert shapes == {LAYERS - frozen} and "backbone.embedding" not in names
    # Forward, and two products for each of the forward's in layers that are trained.
    assert counted[LAYERS] / counted[0] == pytest.approx(1 / 3, abs=0.04)
    assert counted[3] / counted[0] == pytest.approx((3 + 3) / 12, abs=0.04)


def test_parts_and_whole(random_params):
    """Every division has each parameter once, and makes the whole again."""
    whole = random_params(NET)
    for layers in (1, LAYERS):
        partition = Partition(NET, layers)
        frozen = {"trunk": jax.tree.map(jnp.array, trunk_of(whole, layers))}
        above = without_trunk(whole, layers)
        if layers == LAYERS:
            frozen["backbone"] = above.pop("backbone")
        shapes = {name: leaf.shape for name, leaf in walk({**frozen})}
        assert shapes == {name: spec.shape for name, spec in walk(partition.frozen)}
        assert {name for name, _ in walk(partition.trainable)} == {name for name, _ in walk(above)}
        made = partition.whole(frozen, above, jnp.float32)
        for path, leaf in walk(whole):
            np.testing.assert_array_equal(parameters.lookup(made, path), leaf, err_msg=path)
    spec = Partition(NET, 3).trainable["backbone"]["layers"]["mlp"]["up"]["kernel"]
    assert spec.hf_names() == ["model.layers.3.mlp.up_proj.weight"]
    adapters = Partition(NET, 3, Lora(2, 4.0, ("up",))).trainable["backbone"]["layers"]["mlp"]["up"]["lora_a"]
    assert adapters.hf_names() == ["base_model.model.model.layers.3.mlp.up_proj.lora_A.weight"]
    assert dict(walk(Partition(NET).trainable)).keys() == dict(walk(param_specs(NET))).keys()
    assert Partition(NET).frozen == {}


def test_hidden_states_stand_for_the_trunk(batch, random_params):
    """Scores from the trunk's output are those of the whole network."""
    whole, rows = random_params(NET), batch(5)
    inputs = (rows.tokens, rows.positions, rows.subtree_end)
    frozen, above = divided(whole, 2)
    hidden = jax.jit(functools.partial(prm.trunk, NET))(frozen["trunk"], *inputs)
    expected = jax.jit(functools.partial(prm.apply, NET))(whole, *inputs)
    found = jax.jit(functools.partial(prm.apply, NET))(above, *inputs, hidden=hidden)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "lora", "message"),
    [
        (5, None, "--frozen_layers=5: the backbone has 4 layers"),
        (4, Lora(2, 4.0, ("up",)), "freezes all 4 layers and leaves none to the adapters of --lora_rank=2"),
    ],
)
def test_refusals(layers, lora, message):
    with pytest.raises(UserError, match=message):
        Partition(NET, layers, lora)
