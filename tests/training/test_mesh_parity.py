"""Scores and every parameter's gradient on eight devices, in every split of them, against one device.

A network with grouped heads that all splits divide, rows of trees with shared prefixes, and adapters beside the full
weights, so that one compilation a split covers both kinds of training. test_invariance.py has the whole train step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch, pack, tokens_placed
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.models import lora, prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import map_tree, param_specs, walk
from cfprm_jax.sharding import rules
from cfprm_jax.training import step

# Two query heads a key head, with tensor=8 too.
NET = BackboneConfig(64, 32, 48, 2, 16, 8, 4, rope_theta=100.0)
LORA = lora.Lora(2, 4.0, ("query", "down"))
MARKER, STEPS = 63, 5
SPLITS = [(d, f, 8 // (d * f)) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8]


def specs(config: PRMConfig) -> dict[str, Any]:
    """Of all weights, and of adapters with the head that is trained beside them."""
    return {"full": param_specs(config), "adapters": {"backbone": lora.trainable_specs(config, LORA)["backbone"]}}


def weights() -> dict[str, Any]:
    """Large enough that attention looks somewhere, and no bias, norm or adapter that is 0 or 1."""
    rng = np.random.default_rng(0)
    scale = {"norm": 0.3, "bias": 0.3, "matrix": 0.25, "embedding": 0.5}

    def one(path: str, spec: Any) -> np.ndarray:
        del path
        noise = np.float32(scale[spec.kind]) * rng.standard_normal(spec.shape, np.float32)
        return noise + np.float32(spec.kind == "norm")

    return map_tree(one, specs(PRMConfig(NET)))


def trees() -> PackedBatch:
    """Sixteen rows of solutions that leave each other's path at any step; some labels are missing or soft."""
    rng = np.random.default_rng(1)
    encoded = []
    for _ in range(12):
        path = rng.integers(1, MARKER, (STEPS, 3))
        for _ in range(4):
            steps = path.copy()
            steps[rng.integers(1, STEPS) :] = rng.integers(1, MARKER, 3)
            tokens = np.concatenate([[1, 2], *([*one, MARKER] for one in steps)]).astype(np.int32)
            labels = rng.choice([0.0, 1.0, 1.0, 0.7, np.nan], STEPS).astype(np.float32)
            encoded.append(Encoded(tokens, np.flatnonzero(tokens == MARKER).astype(np.int32), labels, 0))
    batch = pack(encoded, "tree", RowShapes(((16, 96),)), len(encoded), STEPS)
    assert tokens_placed(batch) < 0.8 * sum(len(one.tokens) for one in encoded)
    return batch


def compute(mesh: Mesh, attention: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The scores, and the gradient of the loss by every parameter, by name."""
    config = PRMConfig(NET, dtype="float32", attention=attention)
    forward = functools.partial(prm.apply, config, constrain=rules.constrain_activations(mesh))
    loss = losses.loss_function(LossConfig(loss="q_ranking"))
    placed, rows = rules.param_shardings(mesh, specs(config)), rules.batch_shardings(mesh)

    def objective(params: Any, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
        z = step.step_logits(forward, lora.combine(params["full"], params["adapters"], LORA.scale), batch)
        total, count = loss(z, jnp.asarray(batch.labels))
        return total / count, z

    # Barely optimised: compiling is most of what this does.
    run = jax.jit(
        jax.grad(objective, has_aux=True),
        in_shardings=(placed, rows),
        out_shardings=(placed, rules.replicated(mesh)),
        compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )
    grads, z = run(jax.device_put(weights(), placed), rules.put_batch(trees(), rows))
    return np.asarray(z), {name: np.asarray(leaf) for name, leaf in walk(grads)}


@pytest.fixture(scope="module")
def one_device() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    z, grads = compute(rules.make_mesh(DeviceConfig(), jax.devices()[:1]), "xla")
    largest = max(np.abs(leaf).max() for leaf in grads.values())
    for name, leaf in grads.items():  # otherwise the comparison would be vacuous
        assert np.abs(leaf).max() > 1e-3 * largest, name
    return z, grads


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "x".join(map(str, s)))
def test_every_split_gives_what_one_device_gives(one_device: Any, split: tuple[int, int, int]) -> None:
    """data x fsdp x tensor: to 1e-5 of the largest score, and of the largest entry of each gradient."""
    data, fsdp, tensor = split
    mesh = rules.make_mesh(DeviceConfig(mesh=f"data={data},fsdp={fsdp},tensor={tensor}"), jax.devices()[:8])
    # The other kernel, which compiles longer, where rows as well as heads are split.
    z, grads = compute(mesh, "blockwise" if tensor > 1 and data * fsdp > 1 else "xla")
    expected, expected_grads = one_device
    np.testing.assert_allclose(z, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert grads.keys() == expected_grads.keys()
    # Where a gradient's contributions cancel, their rounding does not: hence the second scale.
    largest = max(np.abs(leaf).max() for leaf in expected_grads.values())
    for name, leaf in expected_grads.items():
        scale = max(np.abs(leaf).max(), 0.05 * largest)
        assert np.abs(grads[name] - leaf).max() <= 1e-5 * scale, name


def test_all_splits_are_there() -> None:
    assert len(SPLITS) == len(set(SPLITS)) == 10
    assert all(d * f * t == 8 for d, f, t in SPLITS)
