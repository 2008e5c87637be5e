"""The train step: the update in order, accumulation, meshes, batches without labels, compilations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.models.parameters import walk
from cfprm_jax.training import step

pytestmark = pytest.mark.quick_compile

# float32 sums in another order: 1e-7 times a few terms, and an update is at most the learning rate, 1e-2.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def params_close(a, b, **tolerance) -> None:
    expected = dict(walk(b))
    for name, array in walk(a):
        np.testing.assert_allclose(array, expected.pop(name), err_msg=name, **(tolerance or CLOSE))
    assert not expected


def test_equals_optax_adamw(setup, batch) -> None:
    """Three steps against value_and_grad, optax's own clipping and AdamW, put together anew."""
    s = setup(weight_decay=0.1, max_grad_norm=0.5, decay="constant", warmup_fraction=0.0)
    state, expected = s.init(), s.init().params
    mask = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", expected)
    tx = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, b1=0.9, b2=0.999, eps=1e-2, weight_decay=0.1, mask=mask)
    )
    opt_state = tx.init(expected)
    grad = jax.jit(jax.value_and_grad(s.objective))
    for k in range(3):
        data = s.put(batch(seed=k))
        loss, grads = grad(expected, data)
        updates, opt_state = tx.update(grads, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
        state, metrics = s.step(state, data)
        assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
        assert float(metrics["learning_rate"]) == pytest.approx(1e-2)
        assert int(state.step) == k + 1
    params_close(state.params, expected)


def test_metrics_are_those_of_the_scores(setup, batch) -> None:
    s = setup(loss="mse")
    state, host = s.init(), batch(seed=4)
    z = np.asarray(jax.jit(lambda p, b: step.step_logits(s.forward, p, b))(state.params, s.put(host)), np.float64)
    _, metrics = s.step(state, s.put(host))
    labels, score = host.labels, 1 / (1 + np.exp(-z))
    known = ~np.isnan(labels)
    assert float(metrics["count"]) == known.sum()
    assert float(metrics["loss"]) == pytest.approx(np.mean((score[known] - labels[known]) ** 2), rel=1e-5)
    assert float(metrics["step_accuracy"]) == pytest.approx(np.mean((z > 0)[known] == (labels > 0.5)[known]))
    assert float(metrics["positive_score"]) == pytest.approx(score[labels > 0.5].mean(), rel=1e-5)
    assert float(metrics["negative_score"]) == pytest.approx(score[labels <= 0.5].mean(), rel=1e-5)


@pytest.mark.parametrize("weight", [1e-3, 5.0])
def test_the_weight_of_negatives_cancels_where_all_labels_are(setup, batch, weight: float) -> None:
    """Also where the weights add up to less than 1."""
    host = batch(seed=4)
    host.labels[host.labels > 0.5] = np.nan
    plain, weighted = setup(loss="bce"), setup(loss="bce", negative_weight=weight)
    (a, metrics_a), (b, metrics_b) = (s.step(s.init(), s.put(host)) for s in (plain, weighted))
    assert float(metrics_b["count"]) == pytest.approx(weight * float(metrics_a["count"]))
    assert float(metrics_b["loss"]) == pytest.approx(float(metrics_a["loss"]), rel=1e-5)
    params_close(a.params, b.params)


@pytest.mark.parametrize(("loss", "accumulation"), [("bce", 2), ("q_ranking", 4)])
def test_accumulation_is_one_big_batch(setup, batch, loss: str, accumulation: int) -> None:
    """Also with all labels in one part, where a mean of means would be wrong."""
    whole, parts = setup(loss=loss), setup(loss=loss, accumulation=accumulation)
    uneven = batch(seed=2)
    uneven.labels[uneven.step_positions[:, 0] // 16 % accumulation != 1] = np.nan
    for host in (batch(seed=1), uneven):
        a, metrics_a = whole.step(whole.init(), whole.put(host))
        b, metrics_b = parts.step(parts.init(), parts.put(host))
        for name in metrics_a:
            assert float(metrics_a[name]) == pytest.approx(float(metrics_b[name]), rel=1e-5, nan_ok=True), name
        params_close(a.params, b.params)


def test_split_rows_keeps_every_label_once(batch) -> None:
    host = batch(seed=3)
    parts = jax.tree.map(np.asarray, step.split_rows(jax.tree.map(jnp.asarray, host), 4))
    assert parts.tokens.shape == (4, 2, 16)
    seen = ~np.isnan(parts.labels)
    np.testing.assert_array_equal(seen.sum(0), ~np.isnan(host.labels))
    for part, trajectory, t in np.argwhere(seen):
        there = host.tokens.reshape(-1)[host.step_positions[trajectory, t]]
        assert parts.tokens[part].reshape(-1)[parts.step_positions[part, trajectory, t]] == there
        assert parts.labels[part, trajectory, t] == host.labels[trajectory, t]


def test_accumulation_must_divide_the_rows(setup, batch) -> None:
    s = setup(accumulation=3)
    with pytest.raises(UserError, match="--accumulation=3 does not divide the 8 rows"):
        s.step(s.init(), s.put(batch()))


@pytest.mark.parametrize(("network", "mesh"), [("toy", "data=8"), ("toy", "fsdp=8"), ("prm", "data=2,fsdp=2,tensor=2")])
def test_every_mesh_gives_what_one_device_gives(setup, batch, network: str, mesh: str) -> None:
    one, many = setup(loss="q_ranking", network=network), setup(mesh, 8, loss="q_ranking", network=network)
    a, b = one.init(), many.init()
    for k in range(2):
        a, metrics_a = one.step(a, one.put(batch(seed=k)))
        b, metrics_b = many.step(b, many.put(batch(seed=k)))
        for name in metrics_a:
            assert float(metrics_a[name]) == pytest.approx(float(metrics_b[name]), rel=1e-5), name
    params_close(a.params, b.params)


@pytest.mark.slow
def test_compact_on_a_mesh_is_that_of_one_device(setup, batch) -> None:
    """The loss to 1e-5. Its gradients are bfloat16, whose last bit may fall either way, so masters are compared by the
    size of what moved them: a thousandth of it on average."""
    options = {"loss": "q_ranking", "network": "prm", "optimizer": "adamw_compact"}
    one, many = setup(**options), setup("data=2,fsdp=2,tensor=2", 8, **options)
    a, b = one.init(), many.init()
    start = jax.tree.map(np.array, one.tx.masters(a.params, a.opt_state))  # a copy, as the state is donated
    for k in range(3):
        a, metrics_a = one.step(a, one.put(batch(seed=k)))
        b, metrics_b = many.step(b, many.put(batch(seed=k)))
        assert float(metrics_a["loss"]) == pytest.approx(float(metrics_b["loss"]), rel=1e-5 if k == 0 else 1e-3)
    ours, theirs = one.tx.masters(a.params, a.opt_state), many.tx.masters(b.params, b.opt_state)
    moved = np.concatenate(
        [np.ravel(x - y) for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(start), strict=True)]
    )
    off = np.concatenate(
        [np.ravel(x - np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True)]
    )
    assert np.abs(off).mean() < 1e-3 * np.abs(moved).mean()
    assert b.params["backbone"]["embedding"].dtype == jnp.bfloat16


def test_compact_accumulates_in_bfloat16(setup, batch) -> None:
    """Parts add up to the whole batch within the rounding of the sums."""
    whole, parts = setup(optimizer="adamw_compact"), setup(optimizer="adamw_compact", accumulation=4)
    _, metrics_a = whole.step(whole.init(), whole.put(batch(seed=1)))
    _, metrics_b = parts.step(parts.init(), parts.put(batch(seed=1)))
    assert float(metrics_a["loss"]) == pytest.approx(float(metrics_b["loss"]), rel=1e-5)
    assert float(metrics_a["grad_norm"]) == pytest.approx(float(metrics_b["grad_norm"]), rel=5e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_compact"])
def test_resumes_to_the_same_bits(setup, batch, optimizer: str) -> None:
    """Four steps, and two more after the state went through the host, as through a checkpoint."""
    s = setup(optimizer=optimizer)
    straight, stopped = s.init(), s.init()
    for k in range(4):
        straight, _ = s.step(straight, s.put(batch(seed=k)))
    for k in range(2):
        stopped, _ = s.step(stopped, s.put(batch(seed=k)))
    stopped = jax.device_put(jax.tree.map(np.array, stopped), s.shardings)
    for k in range(2, 4):
        stopped, _ = s.step(stopped, s.put(batch(seed=k)))
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)


def test_without_labels_nothing_moves(setup, batch) -> None:
    """Loss 0, gradient exactly 0, parameters bit-equal; accuracy of nothing is NaN."""
    s = setup(accumulation=2)
    before = jax.tree.map(np.asarray, s.init().params)
    host = batch()
    state, metrics = s.step(s.init(), s.put(host._replace(labels=np.full_like(host.labels, np.nan))))
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["count"]) == 0.0
    assert np.isnan(float(metrics["step_accuracy"]))
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_compiles_once_a_shape_and_reuses_the_state(setup, batch) -> None:
    s = setup("data=2,fsdp=2,tensor=2", 8)
    state = s.init()
    for k in range(3):
        old = state
        state, _ = s.step(state, s.put(batch(seed=k)))
    assert s.step.jitted._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
    state, _ = s.step(state, s.put(batch(rows=16)))
    state, _ = s.step(state, s.put(batch()))
    assert s.step.jitted._cache_size() == 2


def test_learns(setup, batch) -> None:
    s = setup(loss="q_ranking", num_steps=60, learning_rate=0.1, adam_eps=1e-8)
    state, data, seen = s.init(), s.put(batch()), []
    for _ in range(60):
        state, metrics = s.step(state, data)
        seen.append(float(metrics["loss"]))
    assert seen[-1] < 0.7 * seen[0]
    assert float(metrics["positive_score"]) > float(metrics["negative_score"]) + 0.5


def test_eval_step(setup, batch) -> None:
    s = setup("data=4", 4)
    state, host = s.init(), batch()
    evaluate = step.jit_eval_step(s.forward, s.loss, s.param_shardings, s.mesh)
    z, total, count = evaluate(state.params, s.put(host))
    assert z.shape == host.labels.shape
    assert float(total / count) == pytest.approx(float(jax.jit(s.objective)(state.params, s.put(host))), rel=1e-6)
