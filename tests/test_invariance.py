"""What may not matter to a step does not: packing, padding, accumulation, devices, and who shares a row with whom.

A real network, real windows, encoding, packing, losses and train step; gradients are compared parameter by parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch, pack, tokens_placed
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.data.trajectory import Trajectory
from cfprm_jax.data.windows import merge
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import init_params, map_specs, param_specs, walk
from cfprm_jax.sharding import rules
from cfprm_jax.training import step

LOSSES = ("bce", "mse", "q_ranking")
CONFIG = PRMConfig(BackboneConfig(32, 16, 24, 2, 4, 2, 4, rope_theta=100.0, initializer_range=0.25))
MARKER = 31
MOST, STEPS = 12, 6
# Every solution fits into 32 tokens. In rows of 32 a tree is cut; rows of 96 hold three solutions side by side, or a
# tree of many.
SHORT, LONG = RowShapes(((16, 32),)), RowShapes(((4, 96),))


@functools.cache
def params() -> Any:
    """Weights large enough that attention looks somewhere, and no bias or norm that is 0 or 1."""
    fresh = init_params(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    change = {"norm": 0.3, "bias": 0.3, "matrix": 0.0, "embedding": 0.0}
    noise = map_specs(lambda _, s: np.float32(change[s.kind] * rng.standard_normal(s.shape)), CONFIG)
    return jax.tree.map(jnp.add, fresh, noise)


def solution(trajectory: Trajectory) -> Encoded:
    """As the encoder lays it out: the question, then each window and its marker. Letters are tokens."""
    tokens, markers = [ord(c) % 32 for c in trajectory.question], []
    for window in trajectory.steps:
        tokens += [*(ord(c) % 32 for c in window), MARKER]
        markers.append(len(tokens) - 1)
    return Encoded(np.array(tokens, np.int32), np.array(markers, np.int32), trajectory.labels, 0)


@st.composite
def families(draw: st.DrawFn) -> list[Encoded]:
    """Solutions that leave each other's path at any step, at one granularity; equal ones and other questions occur."""
    text = st.text("abc", min_size=1, max_size=3)
    label = st.sampled_from([0.0, 1.0, 1.0, 0.7, 0.4, np.nan])
    granularity = draw(st.sampled_from([1, 2, 3, "whole"]))
    paths: list[tuple[str, list[str], list[float]]] = []
    for _ in range(draw(st.integers(1, MOST))):
        question, steps, labels = draw(st.sampled_from([*paths, ("qqq", [], []), ("qp", [], [])]))
        kept = draw(st.integers(0, min(len(steps), STEPS - 1)))
        more = draw(st.lists(text, min_size=1, max_size=STEPS - kept))
        # An alternative may judge a shared step otherwise: labels belong to trajectories.
        own = draw(st.lists(label, min_size=len(more), max_size=len(more)))
        first = [draw(label) if draw(st.booleans()) else old for old in labels[:kept]]
        paths.append((question, [*steps[:kept], *more], [*first, *own]))
    made = (Trajectory(q, tuple(s), np.array(y, np.float32), "r:1") for q, s, y in paths)
    return [solution(merge(trajectory, granularity, separator="")) for trajectory in made]


def a_family(seed: int, size: int = MOST) -> list[Encoded]:
    """One with a tree that no row of 32 holds."""
    rng = np.random.default_rng(seed)

    def texts(n: int) -> list[str]:
        return ["".join(rng.choice(list("abc"), 3)) for _ in range(n)]

    path = texts(STEPS)
    out = []
    for _ in range(size):
        kept = int(rng.integers(1, STEPS))
        steps = (*path[:kept], *texts(STEPS - kept))
        labels = rng.choice([0.0, 1.0, 1.0, 0.7, np.nan], STEPS).astype(np.float32)
        out.append(solution(Trajectory("qqq", steps, labels, "r:1")))
    return out


class Result(NamedTuple):
    """Values and gradients of the three losses, stacked on axis 0."""

    values: Any
    grads: Any


# Barely optimised: compiling is most of what these tests do.
@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def evaluate(weights: Any, batch: PackedBatch) -> Result:
    """All losses in one compilation."""

    def objective(weights: Any) -> jax.Array:
        z = step.step_logits(functools.partial(prm.apply, CONFIG), weights, batch)
        pairs = [losses.loss_function(LossConfig(loss=name))(z, jnp.asarray(batch.labels)) for name in LOSSES]
        return jnp.stack([total / jnp.maximum(count, 1.0) for total, count in pairs])

    values, pull = jax.vjp(objective, weights)
    return Result(values, jax.vmap(lambda one: pull(one)[0])(jnp.eye(len(LOSSES))))


def packed(family: Sequence[Encoded], packing: str, shapes: RowShapes, most: int = MOST, steps: int = STEPS):
    return pack(family, packing, shapes, most, steps)


def same_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Each leaf to 1e-5 of its largest entry.

    Where a leaf's contributions cancel, their rounding does not: it is held to a twentieth of the largest gradient.
    """
    assert found.keys() == expected.keys()
    largest = max(np.abs(leaf).max() for leaf in expected.values())
    for name, leaf in expected.items():
        scale = max(np.abs(leaf).max(), 0.05 * largest)
        error = np.abs(found[name] - leaf).max()
        assert error <= 1e-5 * scale, f"{name}: off by {error:.2g} of {scale:.2g}"


def gradients(result: Result, loss: str) -> dict[str, np.ndarray]:
    """Those of one loss, by name."""
    return {name: np.asarray(leaf[LOSSES.index(loss)]) for name, leaf in walk(result.grads)}


def agree(found: Result, expected: Result) -> None:
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-7)
    for loss in LOSSES:
        same_gradients(gradients(found, loss), gradients(expected, loss))


@settings(max_examples=15)
@given(families())
def test_packings_agree(family: list[Encoded]) -> None:
    """The three losses and every parameter's gradient, under each packing and in rows of each length."""
    expected = evaluate(params(), packed(family, "none", SHORT))
    for packing in ("tree", "sequence"):
        for shapes in (SHORT, LONG):
            agree(evaluate(params(), packed(family, packing, shapes)), expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_that_is_cut_agrees(seed: int) -> None:
    """Larger than a row, so that paths are repeated; whole, where it has room."""
    family = a_family(seed)
    distinct = shared_forest([one.tokens for one in family]).size
    cut, whole = packed(family, "tree", SHORT), packed(family, "tree", RowShapes(((4, 96),)))
    assert tokens_placed(cut) > distinct > 3 * SHORT.longest
    assert distinct <= tokens_placed(whole) < tokens_placed(cut) <= sum(len(one.tokens) for one in family)
    expected = evaluate(params(), packed(family, "none", SHORT))
    assert (expected.values > 0).all()
    for batch in (cut, whole):
        agree(evaluate(params(), batch), expected)


def test_every_parameter_counts() -> None:
    """Otherwise the comparison of gradients would be vacuous; attention, too, depends on distant tokens."""
    grads = dict(walk(evaluate(params(), packed(a_family(0), "none", SHORT)).grads))
    largest = max(np.abs(leaf).max() for leaf in grads.values())
    assert all(np.abs(leaf).max(axis=tuple(range(1, leaf.ndim))).min() > 1e-3 * largest for leaf in grads.values())


@settings(max_examples=10)
@given(families(), st.integers(0, 1000))
def test_padding_holds_nothing(family: list[Encoded], seed: int) -> None:
    """More rows, longer rows, more trajectories and steps; and what stands in the padding changes no bit."""
    for packing in ("tree", "sequence"):
        batch = packed(family, packing, SHORT)
        expected = evaluate(params(), batch)
        wider = packed(family, packing, RowShapes(((20, 40),)), MOST + 5, STEPS + 3)
        found = evaluate(params(), wider)
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-6, atol=1e-7)
        agree(found, expected)
        rng = np.random.default_rng(seed)
        padding = batch.tokens == 0
        assert padding.any()
        other = batch._replace(
            tokens=np.where(padding, rng.integers(0, 32, padding.shape), batch.tokens).astype(np.int32),
            step_positions=np.where(
                batch.step_positions == 0, rng.integers(0, padding.size, batch.labels.shape), batch.step_positions
            ).astype(np.int32),
        )
        found = evaluate(params(), other)
        np.testing.assert_array_equal(found.values, expected.values)
        jax.tree.map(np.testing.assert_array_equal, found.grads, expected.grads)


class KeepGradients:
    """An optimizer that keeps the gradients in its state and changes nothing."""

    def init(self, masters: Any) -> tuple[Any, Any]:
        return masters, masters

    def update(self, grads: Any, scale: Any, params: Any, opt_state: Any, step: Any) -> tuple[Any, Any]:
        return params, jax.tree.map(lambda g: g * scale, grads)

    def shardings(self, params: Any) -> Any:
        return params


class TrainStep:
    """The train step on a mesh, with gradients in place of the optimizer's state."""

    def __init__(self, loss: str | LossConfig, accumulation: int = 1, mesh: str = "data=1", devices: int = 1) -> None:
        place = rules.make_mesh(DeviceConfig(mesh=mesh), jax.devices()[:devices])
        tx = KeepGradients()
        shardings = rules.param_shardings(place, param_specs(CONFIG))
        self.state_shardings = step.state_shardings(tx, shardings, place)
        self.batch_shardings = rules.batch_shardings(place)
        self.tx = tx
        pure = functools.partial(
            step.train_step,
            forward=functools.partial(prm.apply, CONFIG, constrain=rules.constrain_activations(place)),
            loss=losses.loss_function(loss if isinstance(loss, LossConfig) else LossConfig(loss=loss)),
            config=OptimizerConfig(accumulation=accumulation, max_grad_norm=0.0),
            tx=tx,
            schedule=lambda _: 1.0,
        )
        self.step = step.jit_train_step(lambda state, batch, _: pure(state, batch), self.state_shardings, place)

    def __call__(self, batch: PackedBatch) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients."""
        weights = jax.device_put(jax.tree.map(np.asarray, params()), self.state_shardings.params)
        state = step.init_state(weights, self.tx, self.state_shardings)
        placed = rules.put_batch(batch, self.batch_shardings)
        # Barely optimised, as above.
        compiled = self.step.lower(state, placed).compile({"xla_backend_optimization_level": 0})
        state, metrics = compiled(state, placed, {})
        return float(metrics["loss"]), {name: np.asarray(leaf) for name, leaf in walk(state.opt_state)}


def some_batches() -> list[PackedBatch]:
    """Rows unevenly filled, and labels in a few rows only."""
    uneven = packed(a_family(1, 9), "sequence", SHORT)
    uneven.labels[3:, 1:] = np.nan
    return [packed(a_family(0), "tree", SHORT), uneven, packed(a_family(2), "none", SHORT)]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("bce", {"accumulation": 2}),
        ("q_ranking", {"accumulation": 4}),
        ("mse", {"mesh": "data=8", "devices": 8}),
        ("q_ranking", {"mesh": "data=2,fsdp=2,tensor=2", "devices": 8, "accumulation": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_accumulation_and_devices_agree(loss: str, options: dict[str, Any]) -> None:
    """The train step in parts and on eight devices gives the loss and the gradients of one device and one part."""
    run = TrainStep(loss, **options)
    for batch in some_batches():
        expected = evaluate(params(), batch)
        value, grads = run(batch)
        assert value == pytest.approx(float(expected.values[LOSSES.index(loss)]), rel=1e-5)
        same_gradients(grads, gradients(expected, loss))


@jax.jit
def scores(weights: Any, batch: PackedBatch) -> jax.Array:
    """z of every step of every trajectory."""
    return step.step_logits(functools.partial(prm.apply, CONFIG), weights, batch)


def read(batch: PackedBatch, family: Sequence[Encoded]) -> list[np.ndarray]:
    """z of each trajectory's own steps."""
    z = np.asarray(scores(params(), batch))
    return [row[: len(one.step_positions)] for row, one in zip(z, family, strict=False)]


def largest_score() -> float:
    """What no score can exceed: by Cauchy-Schwarz, as the norm before the head gives vectors of length sqrt(size).

    Rounding follows the terms that a score sums, which may cancel, not the score.
    """
    weights = params()
    output = weights["head"]["output"]
    row = np.asarray(output["kernel"] * weights["backbone"]["final_norm"]["scale"])
    return float(np.linalg.norm(row) * np.sqrt(row.size) + np.abs(output["bias"]).max())


def paths(batch: PackedBatch, family: Sequence[Encoded]) -> list[tuple[int, np.ndarray]]:
    """Each trajectory's row, and the columns of its tokens: those that its last marker sees."""
    columns = np.arange(batch.tokens.shape[1])
    found = []
    for one, places in zip(family, batch.step_positions, strict=False):
        row, last = divmod(int(places[len(one.step_positions) - 1]), len(columns))
        found.append((row, columns[(columns <= last) & (last < batch.subtree_end[row])]))
    return found


@settings(max_examples=12)
@given(families())
def test_scores_do_not_depend_on_batch_mates(family: list[Encoded]) -> None:
    """A trajectory alone: the same bits one a row, and 1e-6 of the largest where it shares rows and prefixes."""
    alone = [read(packed([one], "none", SHORT), [one])[0] for one in family]
    for together, z in zip(read(packed(family, "none", SHORT), family), alone, strict=True):
        np.testing.assert_array_equal(together, z)
    assert max(np.abs(z).max() for z in alone) < largest_score()
    for packing in ("tree", "sequence"):
        for shapes in (SHORT, LONG):
            for together, z in zip(read(packed(family, packing, shapes), family), alone, strict=True):
                np.testing.assert_allclose(together, z, rtol=0, atol=1e-6 * largest_score())


@settings(max_examples=12)
@given(families(), st.sampled_from(["tree", "sequence"]), st.data())
def test_private_tokens_do_not_leak(family: list[Encoded], packing: str, data: st.DataObject) -> None:
    """With every token that is one trajectory's alone exchanged, all others' scores keep their bits."""
    for shapes in (SHORT, LONG):
        batch = packed(family, packing, shapes)
        where, before = paths(batch, family), read(batch, family)
        changed = data.draw(st.integers(0, len(family) - 1))
        row, columns = where[changed]
        others = [c for i, (r, c) in enumerate(where) if i != changed and r == row]
        private = np.setdiff1d(columns, np.concatenate([*others, []]))
        tokens = batch.tokens.copy()
        tokens[row, private] = (tokens[row, private] + data.draw(st.integers(1, 31))) % 32
        after = read(batch._replace(tokens=tokens), family)
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            if i != changed:
                np.testing.assert_array_equal(new, old)
        if len(private):
            assert (after[changed] != before[changed]).any()


class LossParts(NamedTuple):
    """Total and count of each trajectory, and the derivative of the batch's total by each score."""

    totals: jax.Array
    counts: jax.Array
    slopes: jax.Array


@jax.jit
def loss_parts(z: jax.Array, labels: jax.Array) -> list[LossParts]:
    """Of each loss."""
    out = []
    for name in LOSSES:
        loss = losses.loss_function(LossConfig(loss=name))
        each = jax.vmap(lambda z, y, loss=loss: loss(z[None], y[None]))
        out.append(LossParts(*each(z, labels), jax.grad(lambda z, loss=loss: loss(z, labels)[0])(z)))
    return out


@settings(max_examples=12)
@given(families(), st.data())
def test_a_label_flip_changes_its_own_gradient(family: list[Encoded], data: st.DataObject) -> None:
    """The flipped trajectory's own value and gradients, and those of no other, also where the step is shared."""
    labelled = [(i, t) for i, one in enumerate(family) for t in np.flatnonzero(~np.isnan(one.labels))]
    if not labelled:
        return
    k, t = data.draw(st.sampled_from(labelled))
    batch = packed(family, "tree", SHORT)
    labels = batch.labels.copy()
    labels[k, t] = 1 - labels[k, t]
    flipped, others = batch._replace(labels=labels), np.arange(MOST) != k
    z = scores(params(), batch)

    for name, old, new in zip(LOSSES, loss_parts(z, batch.labels), loss_parts(z, labels), strict=True):
        np.testing.assert_array_equal(old.counts, new.counts)
        np.testing.assert_array_equal(old.totals[others], new.totals[others])
        assert old.totals[k] != new.totals[k]
        moved = np.asarray(old.slopes != new.slopes)
        assert not moved[others].any()
        assert moved[k, t]
        assert name == "q_ranking" or moved.sum() == 1

    # Parameters: the batch's gradient moves by what this trajectory's own does, in its share of the count.
    before, after = evaluate(params(), batch), evaluate(params(), flipped)
    lone = [
        evaluate(params(), b._replace(labels=np.where(others[:, None], np.nan, b.labels))) for b in (batch, flipped)
    ]
    known = ~np.isnan(labels)
    for name in LOSSES:
        share = 1 / known.any(axis=1).sum() if name == "q_ranking" else known[k].sum() / known.sum()
        was, now, own_was, own_now = (gradients(result, name) for result in (before, after, *lone))
        same_gradients({leaf: was[leaf] + np.float32(share) * (own_now[leaf] - own_was[leaf]) for leaf in was}, now)
