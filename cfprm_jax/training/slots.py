"""How AdamW's float32 numbers are held between steps: as they are, or in six bytes a parameter.

A format turns a parameter's float32 master into what the train state holds, (param, slot), and gives master and
moments back for one step's arithmetic. `param` is what the network computes with.

Plain: param is the master, slot the two moments, all float32: 12 bytes.

Compact, for large parameters: 6 bytes, of which the 2 of param are the weights that a bfloat16 network needs anyway.

* The master is kept exactly. param is its bfloat16 rounding (ties away from 0), and `low` (int16) what its bits lack:
  bits(master) = (bits(param) << 16) + low.
* The second moment v keeps its float32 exponent and three bits of mantissa, counted from the largest of its row, in 8
  bits: 32 octaves, steps of 6 to 12 %. An average that moves by a thousandth a step would stand still under rounding to
  nearest; it is rounded stochastically, without bias.
* The first moment m is kept as m / sqrt(v), which cannot leave [-R, R] (Cauchy-Schwarz:
  R = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), 7.27 by default): sign and 7 bits, four of them mantissa, of
  |m / sqrt(v)| + c, with c = R / 247 rounded up to a power of two. What it is divided by is v as it is stored, so v's
  rounding does not enter m. Also rounded stochastically.

The random bits are a hash of the element's index in the whole parameter plus a multiple of the step (a Weyl sequence:
over any few steps an element is rounded up in the right share of them, which leaves less error than independent draws).
They depend on nothing else: every mesh, and a run that was resumed, rounds alike. Everything but one maximum over a row
of v is elementwise, so every sharding works.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from cfprm_jax.models.split_float32 import LOW_BITS, join_float32, split_float32


class Moments(NamedTuple):
    """AdamW's state of a parameter in float32, for the arithmetic of one step."""

    master: Any
    first: Any
    second: Any


class RoundingKey(NamedTuple):
    """What stochastic rounding depends on."""

    step: Any  # int32, optimizer steps done
    element: Any  # uint32, a hash of each element's index; see element_hash


class PlainSlot(NamedTuple):
    """Moments in float32."""

    first: Any
    second: Any


class CompactSlot(NamedTuple):
    """What master weights and moments have beyond the bfloat16 parameter."""

    low: Any  # int16: bits of the master minus those of param
    ratio: Any  # int8: first moment over the root of the second
    second: Any  # uint8: second moment, counted from `window`
    window: Any  # int16, a number a row: where the row's 255 values of the second moment begin


@dataclasses.dataclass(frozen=True)
class Plain:
    """Float32 master and moments."""

    dtype = jnp.dtype(jnp.float32)  # of param

    def init(self, master: Float[Array, "*shape"]) -> tuple[jax.Array, PlainSlot]:
        """(param, slot) before the first step."""
        return master, PlainSlot(jnp.zeros_like(master), jnp.zeros_like(master))

    def master(self, param: jax.Array, slot: PlainSlot) -> Float[Array, "*shape"]:
        """The float32 parameter."""
        return param

    def load(self, param: jax.Array, slot: PlainSlot) -> Moments:
        """What (param, slot) stands for."""
        return Moments(param, slot.first, slot.second)

    def store(self, moments: Moments, key: RoundingKey) -> tuple[jax.Array, PlainSlot]:
        """(param, slot) of the moments."""
        return moments.master, PlainSlot(moments.first, moments.second)

    def shardings(self, param: NamedSharding) -> PlainSlot:
        """Where a slot lives, given where its parameter does."""
        return PlainSlot(param, param)


_SECOND_SHIFT = 20  # float32 without sign and the 20 lower bits of its mantissa: exponent and three bits
_RATIO_SHIFT = 19
# Steps of the two sequences, as fractions of 2^32: the powers of the plastic number's inverse, the two numbers whose
# multiples spread most evenly together (as the golden ratio's do alone).
_PLASTIC = 1.324717957244746
_SECOND_STRIDE = round(2**32 / _PLASTIC)
_RATIO_STRIDE = round(2**32 / _PLASTIC**2)


@dataclasses.dataclass(frozen=True)
class Compact:
    """Six bytes a parameter, see the module.

    Attributes:
      smallest: c, the value of |m / sqrt(v)| below which its steps stop shrinking.
    """

    smallest: float

    dtype = jnp.dtype(jnp.bfloat16)

    @classmethod
    def of(cls, b1: float, b2: float) -> Compact:
        """The format for AdamW with these betas."""
        left = 1.0 - b1**2 / b2
        # Where b1^2 >= b2 nothing bounds the ratio; it is then cut at 8, as good as any bound.
        largest = min((1.0 - b1) / math.sqrt((1.0 - b2) * left), 8.0) if left > 0 and b2 < 1 else 8.0
        return cls(2.0 ** math.ceil(math.log2(largest / 247)))

    def init(self, master: Float[Array, "*rows width"]) -> tuple[jax.Array, CompactSlot]:
        """(param, slot) before the first step."""
        param, low = split_float32(master)
        window = jnp.zeros((*master.shape[:-1], 1), jnp.int16)
        return param, CompactSlot(low, jnp.zeros(master.shape, jnp.int8), jnp.zeros(master.shape, jnp.uint8), window)

    def master(self, param: jax.Array, slot: CompactSlot) -> Float[Array, "*rows width"]:
        """The float32 parameter, exactly."""
        return join_float32(param, slot.low)

    def load(self, param: jax.Array, slot: CompactSlot) -> Moments:
        """What (param, slot) stands for."""
        second = decode_second(slot.second, slot.window)
        return Moments(
            join_float32(param, slot.low), decode_ratio(slot.ratio, self.smallest) * jnp.sqrt(second), second
        )

    def store(self, moments: Moments, key: RoundingKey) -> tuple[jax.Array, CompactSlot]:
        """(param, slot) of the moments."""
        step = key.step.astype(jnp.uint32)
        second, window = encode_second(moments.second, key.element + step * jnp.uint32(_SECOND_STRIDE))
        stored = decode_second(second, window)
        root = jnp.where(stored > 0, jax.lax.rsqrt(jnp.where(stored > 0, stored, 1.0)), 0.0)
        bits = key.element * jnp.uint32(_RATIO_STRIDE) + step * jnp.uint32(_RATIO_STRIDE)
        ratio = encode_ratio(moments.first * root, bits, self.smallest)
        param, low = split_float32(moments.master)
        return param, CompactSlot(low, ratio, second, window)

    def shardings(self, param: NamedSharding) -> CompactSlot:
        """Where a slot lives, given where its parameter does."""
        rows = NamedSharding(param.mesh, PartitionSpec(*param.spec[:-1], None))
        return CompactSlot(param, param, param, rows)


def stochastic_round(x: Float[Array, "*shape"], key: RoundingKey) -> Float[Array, "*shape"]:
    """x in bfloat16, up or down in the share of draws that makes it true on average."""
    bits = key.element + key.step.astype(jnp.uint32) * jnp.uint32(_SECOND_STRIDE)
    exact = jax.lax.bitcast_convert_type(x, jnp.uint32)
    high = (exact + (bits >> (32 - LOW_BITS))) >> LOW_BITS
    rounded = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    # NVIDIA's NaN has all bits set, and would overflow into -0.
    return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), rounded)


def encode_second(
    v: Float[Array, "*rows width"], bits: UInt[Array, "*rows width"]
) -> tuple[UInt[Array, "*rows width"], Int[Array, "*rows one"]]:
    """v >= 0 in 8 bits and a number a row, rounded up in the share of bits that makes it true on average.

    0 stays 0. What is more than 32 octaves below the largest of its row becomes the smallest value there is, never 0:
    a second moment of 0 under a first moment that is not would be an infinite update.
    """
    exact = jax.lax.bitcast_convert_type(v, jnp.uint32)
    index = ((exact + (bits >> (32 - _SECOND_SHIFT))) >> _SECOND_SHIFT).astype(jnp.int32)
    window = jnp.maximum(index.max(axis=-1, keepdims=True) - 255, 0)
    code = jnp.where(v > 0, jnp.clip(index - window, 1, 255), 0)
    return code.astype(jnp.uint8), window.astype(jnp.int16)


def decode_second(code: UInt[Array, "*rows width"], window: Int[Array, "*rows one"]) -> Float[Array, "*rows width"]:
    """The second moment that a code stands for."""
    index = jnp.where(code > 0, code.astype(jnp.int32) + window.astype(jnp.int32), 0)
    return jax.lax.bitcast_convert_type(index << _SECOND_SHIFT, jnp.float32)


def _bits_of(smallest: float) -> int:
    """The float32 bits of a power of two, as far as ratios keep them."""
    return (round(math.log2(smallest)) + 127) << (23 - _RATIO_SHIFT)


def encode_ratio(r: Float[Array, "*shape"], bits: UInt[Array, "*shape"], smallest: float) -> Int[Array, "*shape"]:
    """r in 8 bits, rounded up in the share of bits that makes it true on average; 0 stays 0."""
    exact = jax.lax.bitcast_convert_type(jnp.abs(r) + jnp.float32(smallest), jnp.uint32)
    index = ((exact + (bits >> (32 - _RATIO_SHIFT))) >> _RATIO_SHIFT).astype(jnp.int32)
    code = jnp.minimum(index - _bits_of(smallest), 127)
    return jnp.where(r < 0, -code, code).astype(jnp.int8)


def decode_ratio(code: Int[Array, "*shape"], smallest: float) -> Float[Array, "*shape"]:
    """The ratio that a code stands for."""
    wide = code.astype(jnp.int32)
    size = jax.lax.bitcast_convert_type((jnp.abs(wide) + _bits_of(smallest)) << _RATIO_SHIFT, jnp.float32)
    return jnp.where(wide < 0, -1.0, 1.0) * (size - jnp.float32(smallest))


def _hash_bits(x: UInt[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """A bijection of 32 bits in which every input bit changes every output bit about half of the time."""
    # Multipliers found by C. Wellons' search for hash functions of low bias (https://github.com/skeeto/hash-prospector).
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def element_hash(name: str, shape: tuple[int, ...], layer: Any = None, first_layer: int = 0) -> UInt[Array, "*shape"]:
    """A hash of each element: of the parameter's name and of the element's index along each dimension.

    Args:
      layer: the index along the parameter's first dimension, where shape is that of one layer.
      first_layer: added to indices along that dimension, so that layers above frozen ones have the numbers that they
        have in the whole.
    """
    key = jnp.uint32(zlib.crc32(name.encode()))
    if layer is not None:
        key = _hash_bits(key ^ jnp.asarray(layer + first_layer, jnp.uint32))
    for axis in range(len(shape)):
        # Of global arrays, so that a device's part has the numbers that it has in the whole.
        index = jax.lax.broadcasted_iota(jnp.uint32, (*shape[: axis + 1], *(1,) * (len(shape) - axis - 1)), axis)
        if axis == 0 and layer is None and first_layer:
            index += jnp.uint32(first_layer)
        key = _hash_bits(key ^ index)
    return key
