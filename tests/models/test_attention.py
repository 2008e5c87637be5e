"""Attention against a float64 loop over visible pairs, for every backend: values, gradients, the tree rule, isolation.

Kernels for accelerators run on CPU here: Pallas step by step, and cuDNN's arguments in JAX's own plain implementation.
What their compilers make of them is in test_attention_ahead.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.config import ATTENTIONS, DeviceConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models import attention as attention_package
from cfprm_jax.models.attention import BACKENDS, attention, pallas, resolve, visible
from cfprm_jax.models.attention.visibility import visible_blocks
from cfprm_jax.sharding import rules


def reference(q, k, v, subtree_end):
    """The definition in float64, one token at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for r in range(rows):
        for i in range(length):
            seen = [j for j in range(i + 1) if i < subtree_end[r, j]]
            for h in range(heads):
                logits = k[r, seen, h // group] @ q[r, i, h] / np.sqrt(head_dim)
                weights = np.exp(logits - logits.max())
                out[r, i, h] = weights @ v[r, seen, h // group] / weights.sum()
    return out


def forest(generator, length, close=0.3):
    """A random forest in depth-first order, and padding that sees itself."""
    filled = int(generator.integers(length // 2, length + 1))
    parents, path = [], []
    for i in range(filled):
        while path and generator.random() < close:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(i)
    end = np.arange(1, length + 1)
    for i in reversed(range(filled)):
        if parents[i] >= 0:
            end[parents[i]] = max(end[parents[i]], end[i])
    ancestors = [{i} for i in range(length)]
    for i in range(filled):
        if parents[i] >= 0:
            ancestors[i] |= ancestors[parents[i]]
    return end.astype(np.int32), ancestors


def forests(*seeds, length, close=0.3):
    return jnp.asarray(np.stack([forest(np.random.default_rng(seed), length, close)[0] for seed in seeds]))


def inputs(seed, rows, length, heads, kv_heads, head_dim, dtype=jnp.float32):
    generator = np.random.default_rng(seed)
    shapes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The name of a backend that attention() takes, made to run on CPU."""
    if request.param == "pallas":
        monkeypatch.setattr(pallas, "attention", functools.partial(pallas.attention, interpret=True))
    if request.param == "cudnn":
        plain = jax.nn.dot_product_attention
        monkeypatch.setattr(
            jax.nn, "dot_product_attention", lambda *args, implementation, **kwargs: plain(*args, **kwargs)
        )
    return request.param


def jitted(backend):
    # A fresh function each time, which jit has not traced with another test's stand-ins.
    return jax.jit(lambda *args: attention(*args, backend))


def test_visible_is_the_ancestor_relation():
    end, ancestors = forest(np.random.default_rng(3), 40)
    mask = np.asarray(visible(jnp.asarray(end)[None]))[0]
    for i in range(40):
        assert set(np.flatnonzero(mask[i])) == ancestors[i]


@pytest.mark.parametrize(("heads", "kv_heads", "length"), [(7, 1, 20), (4, 4, 33), (6, 2, 300)])
def test_equals_the_definition(backend, heads, kv_heads, length):
    q, k, v = inputs(length, 2, length, heads, kv_heads, 8)
    end = forests(1, 2, length=length)
    got = jitted(backend)(q, k, v, end)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference(q, k, v, np.asarray(end)), rtol=1e-5, atol=2e-6)


# 700 is several blocks of any backend; trees that close seldom are deep, with blocks that see nothing of each other.
@pytest.mark.parametrize(("length", "close"), [(200, 0.3), (700, 0.05)])
def test_gradient_equals_that_of_the_whole_square(backend, length, close):
    heads, kv_heads, head_dim = 4, 2, 8
    q, k, v = inputs(0, 2, length, heads, kv_heads, head_dim)
    end = forests(5, 6, length=length, close=close)

    def square(q, k, v):
        k, v = jnp.repeat(k, heads // kv_heads, 2), jnp.repeat(v, heads // kv_heads, 2)
        logits = jnp.einsum("rihd,rjhd->rhij", q, k) / np.sqrt(head_dim)
        return jnp.einsum("rhij,rjhd->rihd", jax.nn.softmax(logits, where=visible(end)[:, None]), v)

    def total(function):
        return lambda *args: jnp.sum(jnp.sin(function(*args)))

    expected = jax.jit(jax.grad(total(square), argnums=(0, 1, 2)))(q, k, v)
    got = jax.jit(jax.grad(total(lambda q, k, v: attention(q, k, v, end, backend)), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("length", [160, 640])
def test_a_masked_token_changes_no_other_bit(backend, length):
    q, k, v = inputs(1, 1, length, 4, 2, 8)
    # A prefix of 10 tokens, and two branches from it.
    half = length // 2
    end = np.concatenate([np.full(10, length), np.full(half - 10, half), np.full(half, length)]).astype(np.int32)[None]

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(lambda *args: attention(*args, end, backend), q, k, v)
        # Only the second branch's results have a gradient.
        return [out, *pull(jnp.zeros_like(out).at[:, half:].set(1.0))]

    before = run(q, k, v)
    change = lambda x: x.at[:, 10:half].add(3.0)  # noqa: E731
    after = run(change(q), change(k), change(v))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, :10], b[:, :10])
        np.testing.assert_array_equal(a[:, half:], b[:, half:])
    assert np.abs(before[0] - after[0])[:, 10:half].max() > 0.1
    for gradient in before[1:]:
        assert not np.asarray(gradient[:, 10:half]).any()


def test_bfloat16_keeps_its_type_and_is_close(backend):
    q, k, v = inputs(2, 2, 64, 4, 2, 16, jnp.bfloat16)
    end = np.full((2, 64), 64, np.int32)
    got = jitted(backend)(q, k, v, end)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), reference(q, k, v, end), atol=0.03)


@pytest.mark.parametrize("logit_scale", [1e-3, 1e3])
def test_extreme_logits_give_finite_values_and_gradients(backend, logit_scale):
    q, k, v = inputs(4, 1, 600, 2, 1, 8)
    end = forests(9, length=600, close=0.1)
    loss = lambda *args: jnp.sum(jnp.sin(attention(*args, end, backend)))  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q * logit_scale, k, v)
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()


def test_every_device_computes_its_own_rows_and_heads(backend):
    mesh = rules.make_mesh(DeviceConfig(mesh="data=2,fsdp=2,tensor=2"), jax.devices()[:8])
    q, k, v = inputs(7, 4, 200, 4, 2, 8)
    end = forests(1, 2, 3, 4, length=200)

    def loss(q, k, v, placement):
        return jnp.sum(jnp.sin(attention(q, k, v, end, backend, placement=placement)))

    results = []
    for placement in (attention_package.unconstrained, rules.constrain_activations(mesh)):
        function = jax.jit(jax.value_and_grad(functools.partial(loss, placement=placement), argnums=(0, 1, 2)))
        results.append(jax.tree.leaves(function(q, k, v)))
    for one, many in zip(*results, strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-5, atol=1e-6)


def test_blockwise_keeps_nothing_that_grows_with_the_square():
    q, k, v = inputs(0, 1, 2048, 4, 2, 8)
    end = jnp.full((1, 2048), 2048)
    gradients = jax.jit(jax.grad(lambda *args: attention(*args, end, "blockwise").sum(), argnums=(0, 1, 2)))
    needed = gradients.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes
    assert needed < 0.1 * 4 * 4 * 2048**2  # the logits of four heads, float32


@pytest.mark.parametrize("block", [1, 4])
def test_blocks_are_skipped_exactly_where_no_pair_is_visible(block):
    end = forests(*range(6), length=32, close=0.2)
    pairs = np.asarray(visible(end)).reshape(6, 32 // block, block, 32 // block, block)
    np.testing.assert_array_equal(visible_blocks(end, block), pairs.any(axis=(2, 4)))


SHAPE = {"heads": 28, "kv_heads": 4, "head_dim": 128}


@pytest.mark.parametrize(
    ("platform", "dtype", "expected"),
    [
        ("cpu", "bfloat16", "blockwise"),
        ("cpu", "float32", "blockwise"),
        ("gpu", "bfloat16", "cudnn"),
        ("cuda", "bfloat16", "cudnn"),
        ("gpu", "float32", "blockwise"),
        ("tpu", "bfloat16", "pallas"),
        ("tpu", "float32", "pallas"),
    ],
)
def test_auto_takes_what_suits_the_platform(platform, dtype, expected):
    assert resolve("auto", platform, dtype, **SHAPE) == expected
    assert resolve(expected, platform, dtype, **SHAPE) == expected
    assert resolve("xla", platform, dtype, **SHAPE) == "xla"


@pytest.mark.parametrize(
    ("backend", "platform", "dtype", "change", "message"),
    [
        ("flash", "cpu", "float32", {}, "'flash' is not among: auto, xla, blockwise, cudnn, pallas"),
        ("cudnn", "cpu", "bfloat16", {}, "--attention=cudnn is for NVIDIA GPUs, and this runs on cpu"),
        ("cudnn", "tpu", "bfloat16", {}, "--attention=cudnn is for NVIDIA GPUs, and this runs on tpu"),
        ("cudnn", "gpu", "float32", {}, "--attention=cudnn computes in bfloat16, not float32"),
        ("cudnn", "gpu", "bfloat16", {"head_dim": 264}, "up to 256, not 264"),
        ("auto", "gpu", "bfloat16", {"head_dim": 100}, "a multiple of 8 up to 256, not 100"),
        ("pallas", "gpu", "bfloat16", {}, "--attention=pallas is for TPUs, and this runs on gpu"),
        ("auto", "tpu", "bfloat16", {"head_parts": 8}, "tensor=8 does not divide the 28 query heads and 4 key heads"),
        ("auto", "gpu", "float32", {"head_parts": 8}, "tensor=8 does not divide the 28 query heads and 4 key heads"),
        ("cudnn", "gpu", "bfloat16", {"head_parts": 7}, "tensor=7 does not divide the 28 query heads and 4 key heads"),
    ],
)
def test_a_backend_that_cannot_is_refused_by_name(backend, platform, dtype, change, message):
    with pytest.raises(UserError, match=message):
        resolve(backend, platform, dtype, **(SHAPE | change))


def test_the_mesh_determines_the_platform():
    mesh = rules.make_mesh(DeviceConfig(mesh="data=1,fsdp=1,tensor=-1"), jax.devices()[:8])

    class Backbone:
        num_attention_heads, num_key_value_heads, head_dim = 4, 2, 8

    assert rules.attention_backend("auto", mesh, Backbone, "float32") == "xla"  # 8 parts of 4 heads
    with pytest.raises(UserError, match="runs on cpu"):
        rules.attention_backend("pallas", mesh, Backbone, "float32")


@pytest.mark.parametrize("name", ["auto", "flash"])
def test_unresolved_or_unknown_backend_is_refused(name):
    q, k, v = inputs(0, 1, 4, 1, 1, 4)
    with pytest.raises(UserError, match=f"'{name}' is not among: xla, blockwise, cudnn, pallas"):
        attention(q, k, v, jnp.full((1, 4), 4), name)
    assert set(BACKENDS) | {"auto"} == set(ATTENTIONS)
