"""The six-byte format: what is exact is exact, what is rounded is rounded without bias and within its steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfprm_jax.models import split_float32
from cfprm_jax.training import slots
from cfprm_jax.training.slots import Compact, Moments, RoundingKey

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50)


def uniform(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32))


@settings(max_examples=20)
@given(floats)
def test_masters_are_exact(values: list[float]) -> None:
    x = jnp.asarray(values, jnp.float32)
    high, low = split_float32.split_float32(x)
    np.testing.assert_array_equal(
        jax.lax.bitcast_convert_type(split_float32.join_float32(high, low), jnp.uint32),
        jax.lax.bitcast_convert_type(x, jnp.uint32),
    )
    assert high.dtype == jnp.bfloat16 and low.dtype == jnp.int16


def test_the_upper_half_is_the_nearest_bfloat16() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=10_000), jnp.float32)
    np.testing.assert_array_equal(split_float32.split_float32(x)[0], x.astype(jnp.bfloat16))
    # A tie, which IEEE gives to the even neighbour, and half of whose cases int16 cannot hold.
    tie = jax.lax.bitcast_convert_type(jnp.asarray([0x3F808000, 0xBF808000], jnp.uint32), jnp.float32)
    high, low = split_float32.split_float32(tie)
    np.testing.assert_array_equal(np.abs(high.astype(jnp.float32)), 1 + 2.0**-7)
    np.testing.assert_array_equal(low, -(2**15))


def test_weights_that_are_bfloat16_have_no_lower_half() -> None:
    x = jnp.asarray([0.02, -1.5, 0.0], jnp.bfloat16)
    high, low = split_float32.split_float32(x.astype(jnp.float32))
    np.testing.assert_array_equal(high, x)
    assert not low.any()


def test_second_moments_are_unbiased_and_within_a_step() -> None:
    rng = np.random.default_rng(1)
    v = np.exp(rng.uniform(np.log(1e-6), np.log(1e-2), (1, 500))).astype(np.float32)  # 13 octaves
    many = jnp.broadcast_to(jnp.asarray(v), (2000, 500))
    code, window = slots.encode_second(many, uniform(many.shape))
    assert code.dtype == jnp.uint8 and window.dtype == jnp.int16
    found = np.asarray(slots.decode_second(code, window), np.float64)
    assert np.abs(found / v - 1).max() <= 1 / 8
    assert np.abs(found.mean(0) / v - 1).max() < 0.125 * 4 / np.sqrt(2000)


def test_second_moments_that_are_too_small_become_the_smallest_and_never_zero() -> None:
    v = jnp.asarray([[1.0, 2.0**-31, 2.0**-40, 1e-30, 0.0]], jnp.float32)
    found = np.asarray(slots.decode_second(*slots.encode_second(v, uniform(v.shape))))[0]
    assert found[0] == 1.0 and found[4] == 0.0
    assert (found[1:4] > 0).all() and (found[2:4] == found[2:4].min()).all()
    assert 2.0**-33 < found[2] <= 2.0**-31


def test_a_row_of_zeros_stays_one() -> None:
    zero = jnp.zeros((2, 8))
    code, window = slots.encode_second(zero, uniform(zero.shape))
    assert not code.any() and not window.any()
    assert not slots.decode_second(code, window).any()


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.999), (0.95, 0.9)])
def test_ratios_are_unbiased_and_within_a_step(b1: float, b2: float) -> None:
    smallest = Compact.of(b1, b2).smallest
    largest = 247 * smallest
    r = np.concatenate([np.linspace(-largest, largest, 301), np.geomspace(1e-6, largest, 200)]).astype(np.float32)
    many = jnp.broadcast_to(jnp.asarray(r), (2000, len(r)))
    code = slots.encode_ratio(many, uniform(many.shape), smallest)
    found = np.asarray(slots.decode_ratio(code, smallest), np.float64)
    unit = (np.abs(r) + smallest) / 16
    assert (np.abs(found - r) <= unit * 1.001).all()
    assert (np.abs(found.mean(0) - r) < unit * 4 / np.sqrt(2000)).all()
    np.testing.assert_array_equal(slots.encode_ratio(jnp.zeros(50), uniform((50,)), smallest), 0)


@settings(max_examples=20)
@given(st.floats(0.0, 0.97), st.floats(0.95, 0.9999), st.integers(0, 1000))
def test_no_gradients_leave_the_range_of_ratios(b1: float, b2: float, seed: int) -> None:
    """Random ones, and those that make m / sqrt(v) largest."""
    if b1**2 >= 0.98 * b2:
        return
    rng = np.random.default_rng(seed)
    steps = np.arange(200)
    worst = (b1 / b2) ** steps[::-1].astype(float)  # equality in Cauchy-Schwarz
    for g in (rng.normal(size=200), rng.normal(size=200) * np.exp(3 * rng.normal(size=200)), worst):
        m = v = 0.0
        for value in g:
            m, v = b1 * m + (1 - b1) * value, b2 * v + (1 - b2) * value**2
        bound = (1 - b1) / np.sqrt((1 - b2) * (1 - b1**2 / b2))
        assert abs(m) <= 1.0001 * bound * np.sqrt(v)
        if bound < 8:
            assert abs(m) / np.sqrt(v) <= 247 * Compact.of(b1, b2).smallest


def test_a_slow_average_does_not_stand_still() -> None:
    """b2 = 0.999 for 1,000 steps from v = 1 towards 2: to nearest in steps of an eighth, nothing would ever move."""
    held = Compact.of(0.9, 0.999)
    element = slots.element_hash("w", (64, 64))
    param, slot = held.init(jnp.zeros((64, 64)))
    param, slot = held.store(
        Moments(jnp.zeros((64, 64)), jnp.zeros((64, 64)), jnp.ones((64, 64))), RoundingKey(jnp.int32(0), element)
    )

    def one(carry, k):
        old = held.load(*carry)
        moments = Moments(old.master, old.first, 0.999 * old.second + 0.001 * 2.0)
        return held.store(moments, RoundingKey(k, element)), None

    (param, slot), _ = jax.jit(lambda carry: jax.lax.scan(one, carry, jnp.arange(1, 1001)))((param, slot))
    found = np.asarray(held.load(param, slot).second)
    expected = 2 - 0.999**1000
    assert found.mean() == pytest.approx(expected, rel=0.01)
    # Independent draws would spread by 0.16.
    assert found.std() < 0.06 * expected


def test_the_first_moment_survives_the_second_ones_rounding() -> None:
    held = Compact.of(0.9, 0.999)
    rng = np.random.default_rng(0)
    first = jnp.asarray(rng.normal(size=(32, 256)), jnp.float32)
    second = jnp.asarray(np.exp(rng.uniform(-1, 3, (32, 256))), jnp.float32)
    old = Moments(jnp.ones((32, 256)), first, second)
    back = held.load(*held.store(old, RoundingKey(jnp.int32(7), slots.element_hash("w", (32, 256)))))
    allowed = (np.abs(first) + held.smallest * np.sqrt(second) * 1.1) / 16
    assert (np.abs(back.first - first) <= allowed * 1.01).all()


def test_hashes_of_elements_differ_and_are_those_of_the_whole() -> None:
    whole = np.asarray(slots.element_hash("w", (5, 6, 7)))
    assert len(np.unique(whole)) == whole.size
    for layer in range(5):
        np.testing.assert_array_equal(slots.element_hash("w", (6, 7), jnp.int32(layer)), whole[layer])
    assert len(np.intersect1d(whole, slots.element_hash("v", (5, 6, 7)))) == 0
    # Each bit is set half of the time, also along a single row.
    row = np.asarray(slots.element_hash("w", (1, 4096)))
    share = np.unpackbits(row.view(np.uint8)).reshape(-1, 32).mean(0)
    assert np.abs(share - 0.5).max() < 0.05


def test_six_bytes() -> None:
    param, slot = Compact.of(0.9, 0.999).init(jnp.zeros((8, 3584)))
    held = sum(x.nbytes for x in jax.tree.leaves((param, slot)))
    assert held == pytest.approx(6 * param.size, rel=1e-3)


def test_stochastic_rounding_loses_nothing_that_is_not_finite() -> None:
    """NVIDIA's NaN has all bits set, x86's has few; the sum of gradients must stay what the finite check refuses."""
    bits = jnp.repeat(jnp.asarray([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001], jnp.uint32), 1000)
    key = RoundingKey(jnp.int32(3), uniform(bits.shape))
    nan = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert jnp.isnan(slots.stochastic_round(nan, key)).all()
    infinite = jnp.where(bits >> 31 > 0, -jnp.inf, jnp.inf)
    np.testing.assert_array_equal(slots.stochastic_round(infinite, key), infinite)
