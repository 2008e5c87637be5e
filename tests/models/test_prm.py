"""z: the reward head's float32, and the whole model against transformers, one real checkpoint included."""

from __future__ import annotations

import dataclasses
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cfprm_jax.huggingface import loading
from cfprm_jax.models.backbone import Backbone
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import map_specs
from cfprm_jax.models.placement import Placement
from cfprm_jax.models.prm import PRMNetwork, apply
from cfprm_jax.models.reward_head import RewardHead

SMALL = PRMConfig(BackboneConfig(61, 48, 72, 2, 6, 2, 8, 1e-6, 1e4))
forward = jax.jit(apply, static_argnums=0)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_head_equals_its_formula(head, random_params):
    config = dataclasses.replace(SMALL, head=head)
    params = random_params(config)["head"]
    x = np.random.default_rng(0).standard_normal((2, 5, 48)).astype(np.float32)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    hidden = x.astype(np.float64)
    if head == "mlp":
        hidden = np.maximum(hidden @ weights["hidden"]["kernel"].T + weights["hidden"]["bias"], 0)
    expected = hidden @ weights["output"]["kernel"][0] + weights["output"]["bias"][0]
    got = RewardHead(config, params)(jnp.asarray(x))
    assert got.shape == (2, 5)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_z_is_float32_of_a_bfloat16_backbone(head, random_params, make_rows):
    config = dataclasses.replace(SMALL, head=head, dtype="bfloat16")
    params = random_params(config, dtype=jnp.bfloat16)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (2, 20)))
    z = forward(config, params, *rows)
    assert z.dtype == jnp.float32
    hidden = jax.jit(lambda p: Backbone(config, p)(*rows))(params["backbone"])
    assert hidden.dtype == jnp.bfloat16
    exact = RewardHead(config, params["head"])(hidden.astype(jnp.float32))
    np.testing.assert_allclose(z, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(z - z.astype(jnp.bfloat16).astype(jnp.float32)).max() > 0  # it has more than bfloat16's bits


def test_apply_is_the_module(random_params, make_rows):
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (2, 9)))
    np.testing.assert_array_equal(forward(SMALL, params, *rows), jax.jit(lambda p: PRMNetwork(SMALL, p)(*rows))(params))


def test_no_product_with_the_vocabulary(random_params, make_rows):
    text = (
        jax.jit(apply, static_argnums=0).lower(SMALL, random_params(SMALL), *make_rows(np.zeros((1, 8), int))).as_text()
    )
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products and not any("x61x" in line or "<61x" in line for line in products)


@pytest.mark.parametrize("labels", [1, 2])
def test_z_equals_transformers_token_classification(labels, make_reference, make_rows, tmp_path):
    torch = pytest.importorskip("torch")
    model = make_reference(num_labels=labels)
    model.save_pretrained(tmp_path)
    config = PRMConfig(loading.read_config(tmp_path)[0], head=loading.head_of(tmp_path))
    params, report = loading.load_params(tmp_path, config)
    assert (report.head, report.labels) == ("loaded", labels)
    rows = make_rows(np.random.default_rng(0).integers(0, 97, (2, 45)))
    with torch.no_grad():
        logits = model(torch.tensor(rows.tokens.astype(np.int64))).logits.numpy()
    expected = logits[..., 1] - logits[..., 0] if labels == 2 else logits[..., 0]
    z = np.asarray(forward(config, params, *rows))
    assert np.abs(z - expected).max() < 2e-5 * np.abs(expected).max()


# Directories of real weights, separated as in PATH; each family's own numbers are in docs/results.md.
REAL_WEIGHTS = [path for path in os.environ.get("CFPRM_JAX_REAL_WEIGHTS", "").split(os.pathsep) if path]


@pytest.mark.skipif(not REAL_WEIGHTS, reason="CFPRM_JAX_REAL_WEIGHTS names no directories of real weights")
@pytest.mark.parametrize("directory", REAL_WEIGHTS)
def test_real_weights_equal_transformers(directory, make_rows, capsys):
    """Hidden states in float32: to 2e-5 of their largest value."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = PRMConfig(loading.read_config(directory)[0])
    tokens = np.random.default_rng(0).integers(0, config.backbone.vocab_size, (2, 96))
    rows = make_rows(tokens)
    start = time.monotonic()
    params, report = loading.load_params(directory, config, head_key=jax.random.key(0))
    jax.block_until_ready(params)
    loaded = time.monotonic()
    hidden = np.asarray(jax.jit(lambda p: Backbone(config, p)(*rows))(params["backbone"]))
    computed = time.monotonic()
    del params
    with torch.no_grad():
        model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32)
        expected = model(torch.tensor(tokens)).last_hidden_state.numpy()
    error = np.abs(hidden - expected).max() / np.abs(expected).max()
    worst = (np.linalg.norm(hidden - expected, axis=-1) / np.linalg.norm(expected, axis=-1)).max()
    with capsys.disabled():
        print(
            f"\n{report}\nlargest difference {error:.1e} of the largest value, worst token {worst:.1e} relative; "
            f"load {loaded - start:.1f} s, compile and run {computed - loaded:.1f} s"
        )
    assert error < 2e-5
    assert worst < 1e-4


def test_on_a_mesh_equals_one_device(random_params, make_rows):
    """Parameters sharded by their logical axes, rows too, and the residual stream pinned to its rows."""
    params = random_params(SMALL)
    rows = make_rows(np.random.default_rng(0).integers(0, 61, (4, 20)))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    rules = {"embed": "data", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "rows": "data"}

    def place(axes):
        return NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes)))

    class Rows(Placement):
        def __call__(self, activation, axes):
            rows = [axis if axis == "rows" else None for axis in axes]
            return jax.lax.with_sharding_constraint(activation, place(rows))

    sharded = jax.tree.map(jax.device_put, params, map_specs(lambda _, spec: place(spec.axes), SMALL))
    run = jax.jit(lambda params, *rows: apply(SMALL, params, *rows, constrain=Rows()))
    z = run(sharded, *(jax.device_put(x, place(["rows", None])) for x in rows))
    np.testing.assert_allclose(z, forward(SMALL, params, *rows), rtol=2e-5, atol=2e-5)
    assert z.sharding.is_equivalent_to(place(["rows", None]), 2)
