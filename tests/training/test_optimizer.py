"""The learning rate by step, AdamW against float64 and against optax over a run, what decays, clipping, meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import ParamSpec, init_params, map_specs, param_specs, walk
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer, step
from cfprm_jax.training.optimizer import AdamW


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


ZEROS = jax.nn.initializers.zeros
SPECS = {
    "w": ParamSpec((3, 4, 64), ("layers", "mlp", "embed"), "matrix", ZEROS, "w"),
    "b": ParamSpec((3, 4), ("layers", "mlp"), "bias", ZEROS, "b"),
    "e": ParamSpec((64, 16), ("vocab", "embed"), "embedding", ZEROS, "e"),
}


def random_tree(seed: int, scale: float = 1.0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}


def adamw(**options) -> AdamW:
    config = OptimizerConfig(**options)
    return AdamW(config, optimizer.learning_rate_schedule(config, 10), SPECS)


def run(tx: AdamW, steps: int = 10) -> tuple[dict, dict]:
    """(params, opt_state) after steps on gradients that depend on the step alone."""
    params, opt_state = tx.init(random_tree(0))
    update = jax.jit(tx.update)
    for k in range(steps):
        params, opt_state = update(random_tree(k + 1), jnp.float32(1.0), params, opt_state, jnp.int32(k))
    return params, opt_state


def published(learning_rate: float = 0.01, steps: int = 10) -> dict[str, np.ndarray]:
    """The same in float64, from the paper's algorithm; the matrix decays, bias and embedding do not."""
    expected = {name: np.asarray(x, np.float64) for name, x in random_tree(0).items()}
    m, v = dict.fromkeys(SPECS, 0.0), dict.fromkeys(SPECS, 0.0)
    for k in range(1, steps + 1):
        rate = learning_rate * (k / 2 if k <= 2 else 1 - (k - 3) / 8)
        for name, gradient in random_tree(k).items():
            g = np.asarray(gradient, np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g**2
            update = m[name] / (1 - 0.9**k) / (np.sqrt(v[name] / (1 - 0.99**k)) + 1e-8)
            decay = 0.1 * expected[name] if name == "w" else 0.0
            expected[name] = expected[name] - rate * (update + decay)
    return expected


OPTIONS = {"learning_rate": 0.01, "weight_decay": 0.1, "adam_b2": 0.99, "decay": "linear", "warmup_fraction": 0.2}


def test_adamw_is_the_published_one() -> None:
    tx = adamw(**OPTIONS)
    found = tx.masters(*run(tx))
    for name, expected in published().items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7)


def test_compact_is_close_to_the_published_one() -> None:
    """After ten steps: what it moved, within the rounding of the moments; what is not compact, to float32."""
    tx = adamw(optimizer="adamw_compact", **OPTIONS)
    params, opt_state = run(tx)
    assert params["w"].dtype == params["e"].dtype == jnp.bfloat16
    assert params["b"].dtype == jnp.float32
    found, start = tx.masters(params, opt_state), random_tree(0)
    for name, expected in published().items():
        moved, reference = np.asarray(found[name] - start[name], np.float64), expected - start[name]
        assert np.linalg.norm(moved - reference) < 0.05 * np.linalg.norm(reference), name
        np.testing.assert_array_equal(params[name], found[name].astype(params[name].dtype), err_msg=name)
    np.testing.assert_allclose(found["b"], published()["b"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "adamw_compact"])
def test_layer_by_layer_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large layers are updated in a loop; the bits are those of all at once."""
    tx = adamw(optimizer=name, **OPTIONS)
    whole = run(tx, 3)
    monkeypatch.setattr(optimizer, "_LARGE_LAYER", 1)
    text = jax.jit(tx.update).lower(random_tree(1), jnp.float32(1.0), *whole, jnp.int32(0)).as_text()
    assert "while" in text
    jax.tree.map(np.testing.assert_array_equal, run(tx, 3), whole)


@pytest.mark.parametrize("mesh", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=4,tensor=2"])
def test_compact_rounds_alike_on_every_mesh(mesh: str) -> None:
    """Given the same gradients, moments have the bits of one device, and masters all but the last."""
    specs = {"w": ParamSpec((3, 8, 64), ("layers", "mlp", "embed"), "matrix", ZEROS, "w"), "e": SPECS["e"]}
    tx = AdamW(OptimizerConfig(optimizer="adamw_compact"), lambda _: 0.01, specs)
    place = rules.make_mesh(DeviceConfig(mesh=mesh), jax.devices())
    params = rules.param_shardings(place, specs)
    rng = np.random.default_rng(0)
    start = {name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for name, spec in specs.items()}
    grads = [
        {name: jnp.asarray(rng.normal(size=spec.shape), jnp.bfloat16) for name, spec in specs.items()} for _ in range(4)
    ]
    state = step.state_shardings(tx, params, place)

    def trained(jit_options: dict) -> tuple[dict, dict]:
        update = jax.jit(tx.update, **jit_options)
        held = jax.jit(tx.init, **jit_options)(start)
        for k, gradient in enumerate(grads):
            held = update(gradient, jnp.float32(0.5), *held, jnp.int32(k))
        return held

    many = trained({"out_shardings": (state.params, state.opt_state)})
    if "fsdp" in mesh:
        assert not many[1]["e"].second.sharding.is_fully_replicated
    one = trained({})
    for name in specs:
        for held in ("ratio", "second", "window"):
            np.testing.assert_array_equal(getattr(many[1][name], held), getattr(one[1][name], held), err_msg=name)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), tx.masters(*many), tx.masters(*one)
    )


def test_a_gradient_that_is_not_there_moves_nothing() -> None:
    """Rows of an embedding whose tokens never occur: no update, no moment, whatever is drawn."""
    tx = adamw(optimizer="adamw_compact")
    start = random_tree(0)
    params, opt_state = tx.init(start)
    update = jax.jit(tx.update)
    for k in range(3):
        grads = random_tree(k)
        grads["e"] = grads["e"].at[5:].set(0.0)
        params, opt_state = update(grads, jnp.float32(1.0), params, opt_state, jnp.int32(k))
    moved = np.asarray(tx.masters(params, opt_state)["e"] != start["e"])
    assert moved[:5].all()
    assert not moved[5:].any()
    assert not np.asarray(opt_state["e"].second)[5:].any()


class Trained:
    """A small PRM of bfloat16 compute, trained for 300 steps at 2e-6 in four ways on the same batches."""

    steps, rate = 300, 2e-6

    def __init__(self, batch) -> None:
        net = PRMConfig(BackboneConfig(64, 64, 96, 1, 2, 1, 32), dtype="bfloat16")
        specs = param_specs(net)
        loss = losses.loss_function(LossConfig(loss="bce"))

        def objective(params, data):
            total, count = loss(step.step_logits(functools.partial(prm.apply, net), params, data), data.labels)
            return total / jnp.maximum(count, 1)

        # As published weights are.
        self.start = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), init_params(net, jax.random.key(0))
        )
        reference = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(self.rate, weight_decay=0.0))
        own = {
            name: AdamW(OptimizerConfig(optimizer=name), lambda _: self.rate, specs)
            for name in ("adamw", "adamw_compact")
        }

        def advance(held, numbered):
            (k, data), out = numbered, {}
            for name, (params, state) in held.items():
                grads = jax.grad(objective)(params, data)
                if name in own:
                    scale = optimizer.clip_scale(optimizer.global_norm(grads), 1.0)
                    out[name] = own[name].update(grads, scale, params, state, k)
                else:
                    updates, state = reference.update(grads, state, params)
                    out[name] = (optax.apply_updates(params, updates), state)
            return out, None

        plain = jax.tree.map(lambda x: x.astype(jnp.bfloat16), self.start)
        held = {name: tx.init(self.start) for name, tx in own.items()}
        held |= {"optax": (self.start, reference.init(self.start)), "bfloat16": (plain, reference.init(plain))}
        data = jax.tree.map(lambda *x: np.stack(x), *(batch(seed=k, rows=4) for k in range(self.steps)))
        # Barely optimised: compiling is most of what this does.
        train = jax.jit(
            lambda held: jax.lax.scan(advance, held, (jnp.arange(self.steps), data)),
            compiler_options={"xla_backend_optimization_level": 0},
        )
        held, _ = train(held)
        self.masters = {name: own[name].masters(*pair) if name in own else pair[0] for name, pair in held.items()}

    def compare(self, name: str) -> tuple[float, float, float]:
        """Against optax in float32: cosine of the total updates, ratio of their norms, share of weights moved."""
        start = dict(walk(self.start))

        def moved(way: str) -> np.ndarray:
            return np.concatenate(
                [
                    np.ravel(np.asarray(x, np.float64) - np.asarray(start[n], np.float64))
                    for n, x in sorted(walk(self.masters[way]))
                ]
            )

        ours, theirs = moved(name), moved("optax")
        cosine = ours @ theirs / np.sqrt((ours @ ours) * (theirs @ theirs))
        return cosine, np.linalg.norm(ours) / np.linalg.norm(theirs), np.mean(ours[theirs != 0] != 0)


def test_three_hundred_steps_are_those_of_optax(batch) -> None:
    """The paper's learning rate, where plain bfloat16 weights stand still."""
    trained = Trained(batch)
    cosine, ratio, moved = trained.compare("adamw")
    assert cosine > 0.9999 and ratio == pytest.approx(1.0, abs=1e-3) and moved > 0.999
    cosine, ratio, moved = trained.compare("adamw_compact")
    print(f"adamw_compact: cosine {cosine:.5f}, norm {ratio:.4f}, moved {moved:.2%}")
    assert cosine > 0.995 and ratio == pytest.approx(1.0, abs=0.02) and moved > 0.95
    cosine, ratio, moved = trained.compare("bfloat16")
    print(f"bfloat16: cosine {cosine:.5f}, norm {ratio:.4f}, moved {moved:.2%}")
    assert cosine < 0.5 and ratio < 0.5 and moved < 0.2


def test_weights_of_very_different_sizes() -> None:
    """Gradients whose sizes within a row differ ten-thousandfold, as behind outlier features: all weights move alike.

    With moments in 8 bits in linear steps of a row's largest, the cosine is 0.65.
    """
    spec = ParamSpec((64, 256), ("mlp", "embed"), "matrix", ZEROS, "w")
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(1e-4 * np.exp(2 * rng.normal(size=(1, 256)) + rng.normal(size=(64, 1))), jnp.float32)
    mean = jnp.asarray(0.3 * rng.normal(size=(64, 256)), jnp.float32)
    start = {"w": jnp.asarray(0.02 * rng.normal(size=(64, 256)), jnp.float32)}
    ways = {
        name: AdamW(OptimizerConfig(optimizer=name), lambda _: 2e-6, {"w": spec}) for name in ("adamw", "adamw_compact")
    }

    def advance(held, k):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(1), k), mean.shape)
        grads = {"w": (sizes * (mean + noise)).astype(jnp.bfloat16)}
        return {name: tx.update(grads, jnp.float32(1.0), *held[name], k) for name, tx in ways.items()}, None

    held = {name: tx.init(start) for name, tx in ways.items()}
    held, _ = jax.jit(lambda held: jax.lax.scan(advance, held, jnp.arange(300)))(held)
    theirs, ours = (
        np.ravel(np.asarray(ways[name].masters(*held[name])["w"] - start["w"], np.float64)) for name in ways
    )
    assert ours @ theirs > 0.995 * np.linalg.norm(ours) * np.linalg.norm(theirs)
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(theirs), rel=0.02)
    assert (ours != 0).mean() > 0.99


def test_only_matrices_decay() -> None:
    net = BackboneConfig(32, 8, 16, 2, 2, 1, 4)
    specs = param_specs(PRMConfig(net, head="mlp"))
    tx = AdamW(OptimizerConfig(weight_decay=0.5), lambda _: 0.1, specs)
    ones = map_specs(lambda _, spec: jnp.ones(spec.shape), PRMConfig(net, head="mlp"))
    params, opt_state = tx.init(ones)
    nothing = jax.tree.map(jnp.zeros_like, params)
    params, _ = jax.jit(tx.update)(nothing, jnp.float32(1.0), params, opt_state, jnp.int32(0))
    decaying = {name for name, x in walk(params) if float(x.max()) < 1.0}
    assert decaying == {name for name, _ in walk(params) if name.endswith("kernel")}
    assert "head.hidden.kernel" in decaying
    assert "backbone.embedding" not in decaying


@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_clip_is_that_of_optax(size: float) -> None:
    grads = {"a": jnp.asarray([3.0, 4.0]) * size, "b": jnp.asarray([[12.0]]) * size}
    norm = optimizer.global_norm(grads)
    assert float(norm) == pytest.approx(float(optax.tree.norm(grads)))
    expected, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    scale = optimizer.clip_scale(norm, 1.0)
    np.testing.assert_allclose(grads["a"] * scale, expected["a"], rtol=1e-6)
    assert float(optimizer.clip_scale(norm, 0.0)) == 1.0


def test_clip_of_nothing() -> None:
    assert float(optimizer.clip_scale(jnp.float32(0.0), 1.0)) == 1.0


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    assert float(optimizer.global_norm({"a": jnp.ones(10_000, jnp.bfloat16)})) == pytest.approx(100.0)


def test_sums_of_bfloat16_gradients_have_no_bias() -> None:
    """Sixteen parts, each below half a unit in the last place of the sum: to nearest, none of them would count."""
    small = {"a": jnp.full((64, 64), 2.0**-9, jnp.bfloat16)}
    total = {"a": jnp.ones((64, 64), jnp.bfloat16)}
    for k in range(16):
        total = optimizer.add_gradients(total, small, jnp.int32(k))
    assert total["a"].dtype == jnp.bfloat16
    mean = float(total["a"].astype(jnp.float32).mean())
    assert mean == pytest.approx(1 + 16 * 2.0**-9, abs=1e-3)
    exact = optimizer.add_gradients({"a": jnp.float32(1.0)}, {"a": jnp.float32(1e-6)}, jnp.int32(0))
    assert float(exact["a"]) == np.float32(1.0) + np.float32(1e-6)
