"""One layer's attention compiled for accelerators that are not here: its kernels, and the memory that they need."""

from __future__ import annotations

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from cfprm_jax.models.attention import attention
from cfprm_jax.planning import ahead
from cfprm_jax.planning.accelerators import ACCELERATORS

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128  # Qwen2.5 7B
# What one row of the longest that packing makes needs, and a batch of the paper.
SHAPES = [(8, 2048), (1, 6144)]


def compile_layer(accelerator: str, backend: str, rows: int, length: int, dtype: str):
    """The gradients of one layer's attention, compiled, and the text of the program."""
    mesh = ahead.open_mesh(ACCELERATORS[accelerator], 4, "data=4")  # the smallest slice of a TPU that all have
    place = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
    arrays = [jax.ShapeDtypeStruct((rows, length, n, HEAD_DIM), dtype, sharding=place) for n in (HEADS, KV_HEADS)]
    ends = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=place)

    def total(q, k, v, ends):
        return jnp.sum(attention(q, k, v, ends, backend).astype(jnp.float32) ** 2)

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    compiled = gradients.lower(arrays[0], arrays[1], arrays[1], ends).compile()
    text = compiled.as_text()
    # The square of no row is ever in memory as float32: neither logits nor weights.
    assert not re.search(rf"f32\[[\d,]*\b{length},{length}\]", text)
    return compiled.memory_analysis().temp_size_in_bytes, text


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="no XLA compiler for GPUs: pip install '.[aot]'",
)
@pytest.mark.parametrize(("rows", "length"), [*SHAPES, (2, 1000)])
def test_cudnn_is_flash_attention_both_ways(rows, length):
    needed, text = compile_layer("h100-80gb", "cudnn", rows, length, "bfloat16")
    kernels = set(re.findall(r'custom_call_target="(__cudnn[^"]*)"', text))
    assert kernels == {"__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"}
    queries, mask = 2 * rows * length * HEADS * HEAD_DIM, 2 * rows * length**2
    # The output and its gradient, and the mask with the gradient that JAX before 0.11.1 makes of it.
    copies = 4 if length % 128 else 2  # rows that are padded are copied
    assert needed < 1.2 * (copies * queries + 2.5 * mask) + (16 << 20)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no XLA compiler for TPUs: pip install '.[aot]'")
@pytest.mark.parametrize(("rows", "length"), SHAPES)
@pytest.mark.parametrize(("accelerator", "dtype"), [("v5p", "bfloat16"), ("v6e", "bfloat16"), ("v5e", "float32")])
def test_pallas_kernels_compile_both_ways(accelerator, dtype, rows, length):
    needed, text = compile_layer(accelerator, "pallas", rows, length, dtype)
    kernels = re.findall(r"tree_attention_(\w+?)_*\.\d+ = ", text)
    assert sorted(set(kernels)) == ["backward_keys", "backward_queries", "forward"]
    queries = jnp.dtype(dtype).itemsize * rows * length * HEADS * HEAD_DIM
    # Queries, output and its gradient with heads before length, and the log-sum-exps: nothing grows with the square.
    assert needed < 4.5 * queries + (16 << 20)
