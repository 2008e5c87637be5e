"""How much arithmetic a training step is, and how much a device can do: the two parts of MFU.

Counted is what the model needs, whatever was computed: forward and backward, no activations twice (remat), and
attention only over pairs that see each other, which in a tree of tokens are those of a token and its ancestors.
"""

from __future__ import annotations

import numpy as np

from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.partition import Partition

# The backward pass has two products for each of the forward's: the gradients of both factors. Those of frozen weights
# are not needed.
_FORWARD_AND_BACKWARD, _OF_FROZEN = 3, 2

PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("RTX 4090", 165.2e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
)
"""A part of JAX's device_kind -> bfloat16 FLOP/s without sparsity, from data sheets; the first that fits counts."""


def peak_flops(device_kind: str) -> float | None:
    """bfloat16 FLOP/s of a device; None for one that is not in the table, such as a CPU."""
    return next((peak for name, peak in PEAK_FLOPS if name in device_kind), None)


def visible_pairs(batch: PackedBatch, tokens: int) -> int:
    """Visible pairs of a batch (token, token that it attends to): a token attends to its ancestors and itself."""
    return int(np.sum(batch.positions, dtype=np.int64)) + tokens  # padding has position 0


def train_flops(config: PRMConfig, tokens: int, pairs: int, partition: Partition | None = None) -> float:
    """Of one step over the given tokens (without padding) and visible pairs.

    Frozen layers are computed forward only, and not at all where their output is cached. What adapters and their
    gradients need is not counted.

    Args:
      partition: what is trained; by default all.
    """
    partition = partition or Partition(config)
    net = config.backbone
    heads, kv_heads = net.num_attention_heads * net.head_dim, net.num_key_value_heads * net.head_dim
    layer = net.hidden_size * (2 * heads + 2 * kv_heads) + 3 * net.hidden_size * net.intermediate_size
    head = net.hidden_size * (net.hidden_size + 1 if config.head == "mlp" else 1)
    below, above = partition.frozen_layers, net.num_hidden_layers - partition.frozen_layers
    below = 0 if partition.cached else below
    # A product costs 2 FLOPs a weight and token; scores and their sums cost 2 each a pair and element of the heads.
    products = _FORWARD_AND_BACKWARD if partition.lora is None else _OF_FROZEN
    weights = below * layer + products * (above * layer + head)
    scores = 4 * (below + _FORWARD_AND_BACKWARD * above) * heads * pairs
    return float(2 * weights * tokens + scores)
