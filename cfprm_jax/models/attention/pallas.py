"""Flash attention under the tree rule as Pallas kernels for TPU, forward and backward.

Logits live in VMEM a block at a time (Dao et al., https://arxiv.org/abs/2205.14135; the backward pass recomputes them
from the log-sum-exp of each query). The mask is never an array: a block computes it from subtree_end. Blocks in which
no query sees a key are neither fetched nor computed: of a row's square that is the half above the diagonal, and with it
everything between different trees and between different branches. Which blocks remain is found on the device from
subtree_end and prefetched as a list for each block of queries (or of keys).

Rows of any length are padded to whole blocks here; float32 and bfloat16; grouped keys and values are not repeated.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from cfprm_jax.models.attention.visibility import VisibleBlocks, list_visible, pad_rows, visible_blocks

# Lanes of a vector register: blocks are whole multiples.
_LANES = 128
# Larger blocks hide more of a step's fixed cost, smaller ones waste less where few keys are seen. 512 squared in
# float32 is 1 MiB: the handful that a step of the backward pass holds fit into 16 MiB of VMEM.
_BLOCKS = (512, 384, 256)
# Logit of an invisible pair. Finite, so that a query that has seen nothing yet makes no NaN: what it has summed by
# then is multiplied by exp(_MASKED - m) = 0 at its first visible key, and every token sees itself.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def attention(
    q: Float[Array, "rows length heads head_dim"],
    k: Float[Array, "rows length kv_heads head_dim"],
    v: Float[Array, "rows length kv_heads head_dim"],
    subtree_end: Int[Array, "rows length"],
    interpret: bool = False,
) -> Float[Array, "rows length heads head_dim"]:
    """See :func:`cfprm_jax.models.attention.attention`.

    Args:
      interpret: run the kernels step by step as plain JAX, which any platform can.
    """
    length = q.shape[1]
    block = _block_size(length)
    q = (q * q.shape[-1] ** -0.5).astype(q.dtype)
    (q, k, v), ends = pad_rows((q, k, v), subtree_end, block)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return _flash(q, k, v, ends, block, interpret).transpose(0, 2, 1, 3)[:, :length]


def _block_size(length: int) -> int:
    if length <= _BLOCKS[0]:
        return -(-length // _LANES) * _LANES
    return min(_BLOCKS, key=lambda block: (-(-length // block) * block, -block))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, block: int, interpret: bool) -> jax.Array:
    """Attention of [rows, heads, length, head_dim], lengths whole blocks, q scaled already."""
    return _forward(q, k, v, ends, block=block, interpret=interpret)[0]


def _flash_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, block: int, interpret: bool
) -> tuple[jax.Array, Any]:
    out, lse = _forward(q, k, v, ends, block=block, interpret=interpret)
    return out, (q, k, v, ends, out, lse)


def _flash_backward(block: int, interpret: bool, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, ends, out, lse = kept
    # Gradient of the logits is p * (dp - delta), with this delta for each query.
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)[:, :, None]
    visible = visible_blocks(ends, block)
    dq = _query_gradient(
        q, k, v, ends, grad=grad, lse=lse, delta=delta, listed=list_visible(visible), block=block, interpret=interpret
    )
    dk, dv = _key_gradients(
        q,
        k,
        v,
        ends,
        grad=grad,
        lse=lse,
        delta=delta,
        listed=list_visible(visible.swapaxes(1, 2)),
        block=block,
        interpret=interpret,
    )
    return dq, dk, dv, None


_flash.defvjp(_flash_forward, _flash_backward)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over one dimension of each, accumulated in float32; full precision for float32 inputs."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a.astype(b.dtype), b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _seen(query_block: Any, key_block: Any, ends: jax.Array, block: int, query_axis: int) -> jax.Array:
    """The tree rule for one pair of blocks; ends broadcasts along the queries' axis."""
    query = query_block * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), query_axis)
    key = key_block * block + jax.lax.broadcasted_iota(jnp.int32, (block, block), 1 - query_axis)
    return (key <= query) & (query < ends)


def _column(row: jax.Array) -> jax.Array:
    """[1, n] as [n, 1]."""
    return jnp.expand_dims(row[0], -1)


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, ends: jax.Array, *, block: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The output, and the log-sum-exp of each query's logits, float32 [rows, heads, 1, length]."""
    rows, heads, length, head_dim = q.shape
    group, blocks = heads // k.shape[1], length // block
    listed = list_visible(visible_blocks(ends, block))

    def kernel(which, counts, q_ref, k_ref, v_ref, ends_ref, out_ref, lse_ref, highest, total, mixed):
        i, j = pl.program_id(2), pl.program_id(3)
        place = pl.program_id(0) * blocks + i

        @pl.when(j == 0)
        def _() -> None:
            highest[...] = jnp.full_like(highest, _MASKED)
            total[...] = jnp.zeros_like(total)
            mixed[...] = jnp.zeros_like(mixed)

        @pl.when(j < counts[place])
        def _() -> None:
            logits = _dot(q_ref[0, 0], k_ref[0, 0], (1, 1))
            seen = _seen(i, which[place * blocks + j], ends_ref[0], block, 0)
            logits = jnp.where(seen, logits, _MASKED)
            before = highest[...]
            now = jnp.maximum(before, logits.max(axis=1, keepdims=True))
            weights = jnp.exp(logits - now[:, :1])
            fade = jnp.exp(before - now)
            highest[...] = now
            total[...] = fade * total[...] + weights.sum(axis=1, keepdims=True)
            mixed[...] = fade[:, :1] * mixed[...] + _dot(weights, v_ref[0, 0], (1, 0))

        @pl.when(j == blocks - 1)
        def _() -> None:
            out_ref[0, 0] = (mixed[...] / total[:, :1]).astype(out_ref.dtype)
            lse_ref[0, 0] = jnp.transpose(highest[...] + jnp.log(total[...]))[:1]

    def key_block(r, h, i, j, which, counts):
        return which[(r * blocks + i) * blocks + j]

    def key_place(r, h, *rest):
        # Not h // group: the sign of a negative dividend is of no interest, and its lowering needs a TPU.
        return r, jax.lax.div(h, group), key_block(r, h, *rest), 0

    query_spec = pl.BlockSpec((1, 1, block, head_dim), lambda r, h, i, j, *_: (r, h, i, 0))
    key_spec = pl.BlockSpec((1, 1, block, head_dim), key_place)
    ends_spec = pl.BlockSpec((1, 1, block), lambda r, h, i, j, *p: (r, 0, key_block(r, h, i, j, *p)))
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((rows, heads, 1, length), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, heads, blocks, blocks),
            in_specs=[query_spec, key_spec, key_spec, ends_spec],
            out_specs=[query_spec, pl.BlockSpec((1, 1, 1, block), lambda r, h, i, j, *_: (r, h, 0, i))],
            scratch_shapes=[
                pltpu.VMEM((block, _LANES), jnp.float32),
                pltpu.VMEM((block, _LANES), jnp.float32),
                pltpu.VMEM((block, head_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(q, k, 2),
        interpret=interpret,
        name="tree_attention_forward",
    )(*listed, q, k, v, ends[:, None])


def _query_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends: jax.Array,
    *,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    listed: VisibleBlocks,
    block: int,
    interpret: bool,
) -> jax.Array:
    rows, heads, length, head_dim = q.shape
    group, blocks = heads // k.shape[1], length // block

    def kernel(which, counts, q_ref, k_ref, v_ref, ends_ref, grad_ref, lse_ref, delta_ref, dq_ref, dq):
        i, j = pl.program_id(2), pl.program_id(3)
        place = pl.program_id(0) * blocks + i

        @pl.when(j == 0)
        def _() -> None:
            dq[...] = jnp.zeros_like(dq)

        @pl.when(j < counts[place])
        def _() -> None:
            logits = _dot(q_ref[0, 0], k_ref[0, 0], (1, 1))
            seen = _seen(i, which[place * blocks + j], ends_ref[0], block, 0)
            weights = jnp.exp(jnp.where(seen, logits, _MASKED) - _column(lse_ref[0, 0]))
            dlogits = weights * (_dot(grad_ref[0, 0], v_ref[0, 0], (1, 1)) - _column(delta_ref[0, 0]))
            dq[...] += _dot(dlogits, k_ref[0, 0], (1, 0))

        @pl.when(j == blocks - 1)
        def _() -> None:
            dq_ref[0, 0] = dq[...].astype(dq_ref.dtype)

    def key_block(r, h, i, j, which, counts):
        return which[(r * blocks + i) * blocks + j]

    def key_place(r, h, *rest):
        # Not h // group: the sign of a negative dividend is of no interest, and its lowering needs a TPU.
        return r, jax.lax.div(h, group), key_block(r, h, *rest), 0

    query_spec = pl.BlockSpec((1, 1, block, head_dim), lambda r, h, i, j, *_: (r, h, i, 0))
    number_spec = pl.BlockSpec((1, 1, 1, block), lambda r, h, i, j, *_: (r, h, 0, i))
    key_spec = pl.BlockSpec((1, 1, block, head_dim), key_place)
    ends_spec = pl.BlockSpec((1, 1, block), lambda r, h, i, j, *p: (r, 0, key_block(r, h, i, j, *p)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, heads, blocks, blocks),
            in_specs=[query_spec, key_spec, key_spec, ends_spec, query_spec, number_spec, number_spec],
            out_specs=query_spec,
            scratch_shapes=[pltpu.VMEM((block, head_dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(q, k, 3),
        interpret=interpret,
        name="tree_attention_backward_queries",
    )(*listed, q, k, v, ends[:, None], grad, lse, delta)


def _key_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ends: jax.Array,
    *,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    listed: VisibleBlocks,
    block: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Keys run over the outer blocks here, and the logits are transposed: keys by queries."""
    rows, kv_heads, length, head_dim = k.shape
    group, blocks = q.shape[1] // kv_heads, length // block

    def kernel(which, counts, q_ref, k_ref, v_ref, ends_ref, grad_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk, dv):
        i, member, j = pl.program_id(2), pl.program_id(3), pl.program_id(4)
        place = pl.program_id(0) * blocks + i

        @pl.when((member == 0) & (j == 0))
        def _() -> None:
            dk[...] = jnp.zeros_like(dk)
            dv[...] = jnp.zeros_like(dv)

        @pl.when(j < counts[place])
        def _() -> None:
            logits = _dot(k_ref[0, 0], q_ref[0, 0], (1, 1))
            seen = _seen(which[place * blocks + j], i, _column(ends_ref[0]), block, 1)
            weights = jnp.exp(jnp.where(seen, logits, _MASKED) - lse_ref[0, 0])
            dv[...] += _dot(weights, grad_ref[0, 0], (1, 0))
            dlogits = weights * (_dot(v_ref[0, 0], grad_ref[0, 0], (1, 1)) - delta_ref[0, 0])
            dk[...] += _dot(dlogits, q_ref[0, 0], (1, 0))

        @pl.when((member == group - 1) & (j == blocks - 1))
        def _() -> None:
            dk_ref[0, 0] = dk[...].astype(dk_ref.dtype)
            dv_ref[0, 0] = dv[...].astype(dv_ref.dtype)

    def query_block(r, n, i, m, j, which, counts):
        return which[(r * blocks + i) * blocks + j]

    key_spec = pl.BlockSpec((1, 1, block, head_dim), lambda r, n, i, m, j, *_: (r, n, i, 0))
    ends_spec = pl.BlockSpec((1, 1, block), lambda r, n, i, m, j, *_: (r, 0, i))
    query_spec = pl.BlockSpec(
        (1, 1, block, head_dim), lambda r, n, i, m, j, *p: (r, n * group + m, query_block(r, n, i, m, j, *p), 0)
    )
    number_spec = pl.BlockSpec(
        (1, 1, 1, block), lambda r, n, i, m, j, *p: (r, n * group + m, 0, query_block(r, n, i, m, j, *p))
    )
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, blocks, group, blocks),
            in_specs=[query_spec, key_spec, key_spec, ends_spec, query_spec, number_spec, number_spec],
            out_specs=[key_spec, key_spec],
            scratch_shapes=[pltpu.VMEM((block, head_dim), jnp.float32), pltpu.VMEM((block, head_dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(q, k, 4),
        interpret=interpret,
        name="tree_attention_backward_keys",
    )(*listed, q, k, v, ends[:, None], grad, lse, delta)


def _cost(q: jax.Array, k: jax.Array, products: int) -> pl.CostEstimate:
    """Cost estimate for XLA's scheduler: the causal half of the products of queries with keys; trees need less."""
    rows, heads, length, head_dim = q.shape
    pairs = rows * heads * length * length // 2
    return pl.CostEstimate(
        flops=2 * products * pairs * head_dim, transcendentals=pairs, bytes_accessed=2 * (q.nbytes + k.nbytes)
    )
