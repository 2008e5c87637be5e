"""What counts once does: losses over distinct steps and over questions, against a trie that is enumerated in float64.

The families of solutions, the network and the train step are those of test_invariance: real windows and packing, trees
that are cut between rows, accumulation, devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from test_invariance import (
    CONFIG,
    LONG,
    MOST,
    SHORT,
    STEPS,
    TrainStep,
    a_family,
    families,
    params,
    same_gradients,
)

from cfprm_jax import losses
from cfprm_jax.config import LossConfig
from cfprm_jax.data.distinct import distinct_steps
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch, pack, tokens_placed
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.errors import UserError
from cfprm_jax.models import prm
from cfprm_jax.models.parameters import walk
from cfprm_jax.training import step

CONFIGS = {
    "bce": LossConfig(loss="bce", label_weight="node"),
    "mse": LossConfig(loss="mse", label_weight="node"),
    "bce_weighted": LossConfig(loss="bce", label_weight="node", negative_weight=2.5),
    "question": LossConfig(loss="q_ranking", label_weight="question"),
    "path": LossConfig(loss="q_ranking", label_weight="node", ranking_negatives="path"),
    "all": LossConfig(loss="q_ranking", label_weight="node", ranking_negatives="question", margin=1.5),
}
QUESTION = [ord(c) % 32 for c in "qqq"]


def question_of(one: Encoded) -> int:
    return int(one.tokens[:3].tolist() == QUESTION)


def batch_of(family: Sequence[Encoded], packing: str, shapes: RowShapes, most: int = MOST, steps: int = STEPS) -> Any:
    """A batch as the loader makes it."""
    distinct = distinct_steps(family, [question_of(one) for one in family], most, steps)
    return pack(family, packing, shapes, most, steps)._replace(distinct=distinct)


class Trie:
    """The distinct steps of a family by their texts, one entry each, in float64."""

    def __init__(self, family: Sequence[Encoded], z: Sequence[np.ndarray]) -> None:
        self.z: dict[Any, float] = {}
        self.path: dict[Any, list[Any]] = {}  # the question, and the steps up to this one
        seen: dict[Any, list[float]] = {}
        for one, logits in zip(family, z, strict=True):
            path: list[Any] = [question_of(one)]
            for position, label, logit in zip(one.step_positions, one.labels.tolist(), logits, strict=True):
                node = (question_of(one), *one.tokens[: position + 1].tolist())
                path = [*path, node]
                self.z.setdefault(node, float(logit))
                self.path[node] = path
                seen.setdefault(node, []).extend([] if np.isnan(label) else [label])
        self.label = {node: float(np.mean(labels)) for node, labels in seen.items() if labels}
        self.positive = [node for node, label in self.label.items() if label > 0.5]
        self.negative = [node for node, label in self.label.items() if label <= 0.5]


def by_trajectory(z: np.ndarray, labels: np.ndarray, margin: float) -> float | None:
    """A trajectory's Q-ranking value; None without a label."""
    negatives = [v + margin for v, y in zip(z, labels, strict=True) if y <= 0.5]
    positives, terms = [], []
    for v, y in zip(z, labels, strict=True):
        if y > 0.5:
            positives.append(v)
            terms.append(np.logaddexp.reduce([0.0, *positives, *negatives]) - v)
    if negatives:
        terms.append(np.logaddexp.reduce([0.0, *negatives]))
    return float(np.mean(terms)) if terms else None


def reference(config: LossConfig, family: Sequence[Encoded], z: Sequence[np.ndarray]) -> tuple[float, float]:
    """(total, count), from the definitions."""
    z = [np.asarray(logits, np.float64) for logits in z]
    if config.label_weight == "question":
        values: dict[int, list[float]] = {}
        for one, logits in zip(family, z, strict=True):
            value = by_trajectory(logits, one.labels, config.margin)
            if value is not None:
                values.setdefault(question_of(one), []).append(value)
        return sum(float(np.mean(v)) for v in values.values()), len(values)
    trie = Trie(family, z)
    if config.loss != "q_ranking":
        total = count = 0.0
        for node, y in trie.label.items():
            v = trie.z[node]
            weight = 1.0 if y > 0.5 else config.negative_weight
            count += weight
            if config.loss == "bce":
                total += weight * (y * np.logaddexp(0, -v) + (1 - y) * np.logaddexp(0, v))
            else:
                total += weight * (1 / (1 + np.exp(-v)) - y) ** 2
        return float(total), count
    terms = []
    for t in trie.positive:
        path = trie.path[t]
        against = [
            trie.z[w] + config.margin
            for w in trie.negative
            if w[0] == t[0] and (config.ranking_negatives == "question" or trie.path[w][-2] in path)
        ]
        before = [trie.z[p] for p in path[1:] if p in trie.positive]
        terms.append(np.logaddexp.reduce([0.0, *before, *against]) - trie.z[t])
    for q in {w[0] for w in trie.negative}:
        terms.append(np.logaddexp.reduce([0.0, *(trie.z[w] + config.margin for w in trie.negative if w[0] == q)]))
    return float(sum(terms)), len(terms)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def evaluate(weights: Any, batch: PackedBatch) -> tuple[jax.Array, jax.Array, Any, jax.Array]:
    """Totals, counts and gradients of every loss, and the step logits, in one compilation."""

    def objective(weights: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        z = step.step_logits(functools.partial(prm.apply, CONFIG), weights, batch)
        sums = [losses.loss_function(c)(z, jnp.asarray(batch.labels), batch.distinct) for c in CONFIGS.values()]
        totals, counts = jnp.stack([t for t, _ in sums]), jnp.stack([n for _, n in sums])
        return totals / jnp.maximum(counts, 1), (totals, counts, z)

    _, pull, (totals, counts, z) = jax.vjp(objective, weights, has_aux=True)
    # One after another: by vmap, XLA for CPUs gives a wrong gradient through the norm for some shapes.
    return totals, counts, jax.lax.map(lambda one: pull(one)[0], jnp.eye(len(CONFIGS))), z


def gradients(found: Any, name: str) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf[list(CONFIGS).index(name)]) for path, leaf in walk(found)}


def check(family: Sequence[Encoded], batch: PackedBatch) -> Any:
    """Every loss of a batch is the trie's, for the same step logits; returns totals and gradients."""
    totals, counts, grads, logits = evaluate(params(), batch)
    z = [row[: len(one.step_positions)] for row, one in zip(np.asarray(logits), family, strict=False)]
    for place, (name, config) in enumerate(CONFIGS.items()):
        total, count = reference(config, family, z)
        assert float(counts[place]) == pytest.approx(count, rel=1e-6), name
        assert float(totals[place]) == pytest.approx(total, rel=1e-6, abs=1e-6), name
    return totals, grads


@settings(max_examples=15)
@given(families())
def test_every_packing_is_the_trie(family: list[Encoded]) -> None:
    """Values and gradients under each packing, in rows of each length, with padding; the short ones cut trees."""
    totals, expected = check(family, batch_of(family, "none", SHORT))
    others = [batch_of(family, packing, shapes) for packing in ("tree", "sequence") for shapes in (SHORT, LONG)]
    others.append(batch_of(family, "tree", RowShapes(((20, 40),)), MOST + 5, STEPS + 3))
    for batch in others:
        same, found = check(family, batch)
        np.testing.assert_allclose(same, totals, rtol=1e-5, atol=1e-6)  # step logits are rounded in another order
        for name in CONFIGS:
            same_gradients(gradients(found, name), gradients(expected, name))


@pytest.mark.parametrize("seed", range(2))
def test_a_path_that_a_cut_repeats_counts_once(seed: int) -> None:
    family = a_family(seed)
    cut = batch_of(family, "tree", SHORT)
    assert tokens_placed(cut) > shared_forest([one.tokens for one in family]).size
    twice = [
        len({int(p) for p in cut.step_positions[cut.distinct.nodes == node]}) for node in np.unique(cut.distinct.nodes)
    ]
    assert max(twice) > 1  # there is a step that is computed in two rows
    check(family, cut)
    _, counts, _, logits = evaluate(params(), cut)
    z = [row[: len(one.step_positions)] for row, one in zip(np.asarray(logits), family, strict=False)]
    assert float(counts[0]) == len(Trie(family, z).label) < np.sum(~np.isnan(cut.labels))


def test_the_same_solution_again_changes_nothing() -> None:
    """By distinct steps; by trajectory it does."""
    family = [one for one in a_family(3, 6) if not np.isnan(one.labels).all()]
    both = [*family, *family]
    alone, again = (evaluate(params(), batch_of(f, "tree", SHORT)) for f in (family, both))
    for place, name in enumerate(CONFIGS):
        if name != "question":
            assert float(again[1][place]) == float(alone[1][place]), name
        assert float(again[0][place]) == pytest.approx(float(alone[0][place]), rel=1e-6), name
        same_gradients(gradients(again[2], name), gradients(alone[2], name))


def test_labels_that_differ_are_averaged() -> None:
    """Two of three labels are negative; an unlabelled first occurrence carries the label of the others."""
    (one, *_) = a_family(0, 1)
    nan = float("nan")
    rows = [[nan, 1, 0, nan, 1, nan], [0.7, 0, 1, nan, 1, nan], [0.7, 0, 1, nan, 1, nan]]
    family = [Encoded(one.tokens, one.step_positions, np.array(y, np.float32), 0) for y in rows]
    distinct = distinct_steps(family, [5, 5, 5], 4, 7)
    np.testing.assert_array_equal(distinct.nodes[:3, :6], np.tile(np.arange(6), (3, 1)))
    np.testing.assert_allclose(distinct.labels[0, :3], [0.7, 1 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_array_equal(distinct.labels[0, 3:], [nan, 1, nan, nan])
    assert np.isnan(distinct.labels[1:]).all()
    np.testing.assert_array_equal(distinct.questions, [0, 0, 0, 3])
    apart = distinct_steps(family, [5, 6, 5], 4, 7)
    np.testing.assert_array_equal(apart.questions, [0, 1, 0, 3])
    np.testing.assert_array_equal(apart.nodes[1], np.arange(7, 14))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bce", {"accumulation": 4}),
        ("path", {"accumulation": 4}),
        ("question", {"accumulation": 2, "mesh": "data=2,fsdp=2,tensor=2", "devices": 8}),
        ("all", {"mesh": "data=8", "devices": 8}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_accumulation_and_devices_agree(name: str, options: dict[str, Any]) -> None:
    """A question's solutions lie in several rows, and so in several microbatches and devices."""
    run = TrainStep(CONFIGS[name], **options)
    for family, packing in ((a_family(0), "tree"), (a_family(1, 9), "sequence")):
        batch = batch_of(family, packing, SHORT)
        totals, counts, grads, _ = evaluate(params(), batch)
        place = list(CONFIGS).index(name)
        value, found = run(batch)
        assert value == pytest.approx(float(totals[place] / counts[place]), rel=1e-6)
        same_gradients(found, gradients(grads, name))


@jax.jit
def ranked(z: jax.Array, distinct: Any, labels: jax.Array) -> list[tuple[Any, jax.Array]]:
    """(total and count, gradient) of the three rankings over several trajectories."""
    out = []
    for name in ("question", "path", "all"):
        loss = losses.loss_function(CONFIGS[name])
        out.append((loss(z, labels, distinct), jax.grad(lambda z, loss=loss: loss(z, labels, distinct)[0])(z)))
    return out


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_rankings_are_right_and_finite_for_large_logits(size: float) -> None:
    """Values against float64, gradients finite; the gradient against central differences where these exist."""
    rng = np.random.default_rng(0)
    for seed in range(4):
        family = a_family(seed, MOST)
        batch = batch_of(family, "none", SHORT)
        logits = rng.choice([-size, 0.0, size, 0.5 * size], MOST * STEPS).astype(np.float32).reshape(MOST, STEPS)
        z = logits.reshape(-1)[batch.distinct.nodes]
        rows = [row[: len(one.step_positions)] for row, one in zip(z, family, strict=True)]
        found = ranked(z, batch.distinct, batch.labels)
        for name, ((total, count), slope) in zip(("question", "path", "all"), found, strict=True):
            expected = reference(CONFIGS[name], family, rows)
            assert (float(total), float(count)) == (pytest.approx(expected[0], rel=3e-6), expected[1]), name
            assert np.isfinite(np.asarray(slope)).all()
            if size == 1.0:
                # A direction that moves all occurrences of a step alike.
                move = rng.normal(size=(MOST * STEPS)).astype(np.float64)[batch.distinct.nodes]
                ends = []
                for h in (1e-4, -1e-4):
                    moved = [r + h * m[: len(r)] for r, m in zip(rows, move, strict=True)]
                    ends.append(reference(CONFIGS[name], family, moved)[0])
                assert float(np.sum(np.asarray(slope) * move)) == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-4)


def test_without_labels() -> None:
    family = [Encoded(o.tokens, o.step_positions, np.full_like(o.labels, np.nan), 0) for o in a_family(0, 3)]
    totals, counts, grads, _ = evaluate(params(), batch_of(family, "tree", LONG))
    assert not np.asarray(totals).any() and not np.asarray(counts).any()
    assert all(not leaf.any() for name in CONFIGS for leaf in gradients(grads, name).values())


def test_the_weight_of_negatives_rebalances() -> None:
    """As if every negative were there that often."""
    z, y = jnp.asarray([[0.3, -1.0, 2.0, 0.0]]), jnp.asarray([[1.0, 0.0, 0.5, jnp.nan]])
    for name in ("bce", "mse"):
        weighted = losses.loss_function(LossConfig(loss=name, negative_weight=3.0))(z, y)
        function = getattr(losses, name)
        twice = function(z[:, [0, 1, 1, 1, 2, 2, 2]], y[:, [0, 1, 1, 1, 2, 2, 2]])
        np.testing.assert_allclose(weighted, twice, rtol=1e-6)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match=r"--label_weight=question is for --loss=q_ranking"):
        LossConfig(loss="bce", label_weight="question")
    with pytest.raises(UserError, match=r"--negative_weight=2 is for"):
        LossConfig(loss="q_ranking", negative_weight=2.0)
