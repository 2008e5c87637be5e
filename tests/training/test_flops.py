"""FLOPs against a count by hand, and against those of XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import pack
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.models import prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import abstract_tree, param_specs
from cfprm_jax.models.partition import Partition
from cfprm_jax.training import flops

SEVEN_B = BackboneConfig(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
)


def test_a_token_of_7b() -> None:
    """40.4 GFLOP a token of a full row of 2048, forward and backward."""
    pairs = 2048 * 2049 // 2
    assert flops.train_flops(PRMConfig(SEVEN_B), 2048, pairs) / 2048 == pytest.approx(40.4e9, rel=2e-3)


def test_frozen_weights_have_no_gradients() -> None:
    config = PRMConfig(SEVEN_B)
    adapters = Partition(config, lora=Lora(8, 8.0, ("query",)))
    whole, frozen = (flops.train_flops(config, 2048, 0, parts) for parts in (None, adapters))
    assert frozen == pytest.approx(whole * 2 / 3)
    attention = [flops.train_flops(config, 0, 100, parts) for parts in (None, adapters)]
    assert attention[0] == attention[1] > 0


def test_frozen_layers_are_computed_forward_or_not_at_all() -> None:
    """Half of the layers forward alone is two thirds of the whole; cached, it is half."""
    config = PRMConfig(SEVEN_B)
    parts = (None, Partition(config, 14), Partition(config, 14, cached=True))
    whole, frozen, cached = (flops.train_flops(config, 2048, 2048 * 1024, part) for part in parts)
    assert frozen == pytest.approx(whole * 2 / 3, rel=1e-5)
    assert cached == pytest.approx(whole / 2, rel=1e-5)


@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_forward_against_xla(head: str) -> None:
    """Without the attention's causal half XLA counts the same products, and little besides."""
    config = PRMConfig(BackboneConfig(512, 256, 1024, 1, 4, 2, 64), head=head, remat="none", dtype="float32")
    rows, length = 1, 128
    shape = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    params = abstract_tree(param_specs(config))
    compiled = jax.jit(lambda p, *batch: prm.apply(config, p, *batch)).lower(params, *[shape] * 3)
    counted = compiled.compile().cost_analysis()["flops"]
    assert flops.train_flops(config, rows * length, rows * length**2) / 3 == pytest.approx(counted, rel=0.03)


def test_pairs_of_a_tree_and_of_sequences() -> None:
    """Two solutions that share four of their six tokens."""
    pair = [
        Encoded(np.array([1, 2, 3, 4, *end], np.int32), np.array([5], np.int32), np.ones(1, np.float32), 0)
        for end in ([5, 6], [7, 8])
    ]
    for packing, tokens, pairs in (("tree", 8, 21 + 11), ("sequence", 12, 42), ("none", 12, 42)):
        batch = pack(pair, packing, RowShapes.covering((16,), 2, 1), 2, 1)
        assert flops.visible_pairs(batch, tokens) == pairs


def test_peaks() -> None:
    assert flops.peak_flops("NVIDIA H100 80GB HBM3") == flops.peak_flops("NVIDIA H800") == 989.4e12
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert flops.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert flops.peak_flops("TPU v5 lite") == 197e12
    assert flops.peak_flops("TPU v5p") == flops.peak_flops("TPU v5") == 459e12
    assert flops.peak_flops("TPU v6 lite") == 918e12
    assert flops.peak_flops("cpu") is None
