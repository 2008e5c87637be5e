"""The learning rate by step, AdamW against float64, what decays, clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cfprm_jax.config import OptimizerConfig
from cfprm_jax.models.config import PRMConfig, Qwen2Config
from cfprm_jax.models.parameters import ParamSpec, param_specs, walk
from cfprm_jax.training import optimizer


def rates(num_steps: int, **options) -> np.ndarray:
    schedule = optimizer.learning_rate_schedule(OptimizerConfig(learning_rate=1.0, **options), num_steps)
    return np.asarray([float(schedule(jnp.asarray(k, jnp.int32))) for k in range(num_steps + 1)])


def test_linear_by_hand() -> None:
    np.testing.assert_allclose(
        rates(8, warmup_fraction=0.25, decay="linear"), [0.5, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0], atol=1e-6
    )


def test_cosine_is_that_of_optax_after_the_warmup() -> None:
    ours = rates(20, warmup_fraction=0.2, decay="cosine", final_rate_fraction=0.1)
    theirs = optax.cosine_decay_schedule(1.0, 16, alpha=0.1)
    np.testing.assert_allclose(ours[:4], [0.25, 0.5, 0.75, 1.0], rtol=1e-6)
    np.testing.assert_allclose(ours[4:], [float(theirs(k)) for k in range(17)], rtol=1e-5, atol=1e-6)
    assert ours[20] == pytest.approx(0.1, rel=1e-5)


def test_constant_and_edges() -> None:
    np.testing.assert_allclose(rates(3, warmup_fraction=0.0, decay="constant"), 1.0)
    np.testing.assert_allclose(rates(1, warmup_fraction=0.0)[:1], 1.0)
    np.testing.assert_allclose(rates(4, warmup_fraction=1.0)[:4], [0.25, 0.5, 0.75, 1.0])
    assert (rates(50, warmup_fraction=0.03)[:50] > 0).all()  # no step is without effect


def test_adamw_is_the_published_one() -> None:
    """Ten steps against a float64 version written from the paper; the matrix decays, the bias does not."""
    config = OptimizerConfig(learning_rate=0.01, weight_decay=0.1, adam_b2=0.99, decay="linear", warmup_fraction=0.2)
    zeros = jax.nn.initializers.zeros
    specs = {
        "w": ParamSpec((3, 4), ("embed", "mlp"), "matrix", zeros, "w"),
        "b": ParamSpec((4,), ("mlp",), "bias", zeros, "b"),
    }
    schedule = optimizer.learning_rate_schedule(config, 10)
    tx = optimizer.make_optimizer(config, schedule, specs)
    rng = np.random.default_rng(0)
    expected = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), expected)
    state = tx.init(params)
    m, v = dict.fromkeys(specs, 0.0), dict.fromkeys(specs, 0.0)
    for k in range(1, 11):
        grads = {name: rng.normal(size=x.shape) for name, x in expected.items()}
        rate = 0.01 * (k / 2 if k <= 2 else 1 - (k - 3) / 8)
        for name, g in grads.items():
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g**2
            update = m[name] / (1 - 0.9**k) / (np.sqrt(v[name] / (1 - 0.99**k)) + 1e-8)
            decay = 0.1 * expected[name] if name == "w" else 0.0
            expected[name] = expected[name] - rate * (update + decay)
        updates, state = tx.update(jax.tree.map(jnp.float32, grads), state, params)
        params = optax.apply_updates(params, updates)
    for name in specs:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)


def test_only_matrices_decay() -> None:
    net = Qwen2Config(32, 8, 16, 2, 2, 1, 4)
    mask = optimizer.decay_mask(param_specs(PRMConfig(net, head="mlp")))
    decaying = {name for name, decays in walk(mask) if decays}
    assert decaying == {name for name, _ in walk(mask) if name.endswith("kernel")}
    assert "head.hidden.kernel" in decaying
    assert "backbone.embedding" not in decaying


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_clip_is_that_of_optax(size: float) -> None:
    grads = {"a": jnp.asarray([3.0, 4.0]) * size, "b": jnp.asarray([[12.0]]) * size}
    norm = optax.tree.norm(grads)
    expected, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    clipped = optimizer.clip(grads, norm, 1.0)
    np.testing.assert_allclose(clipped["a"], expected["a"], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], expected["b"], rtol=1e-6)
    assert optimizer.clip(grads, norm, 0.0) is grads


def test_clip_of_nothing() -> None:
    zero = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(optimizer.clip(zero, optax.tree.norm(zero), 1.0)["a"], 0.0)
