"""What the backward pass keeps, against what is known of the network, by --remat and on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from cfprm_jax.config import LossConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import abstract_tree
from cfprm_jax.models.partition import Partition
from cfprm_jax.planning.activations import saved_bytes

# As many layers as rows: what has a dimension of that length need not be of every layer.
LAYERS, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM = 8, 64, 320, 4, 2, 16
NET = BackboneConfig(512, EMBED, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM)
ROWS, LENGTH = 8, 256
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


def saved(
    remat: str = "layer",
    mesh: dict[str, int] = ONE,
    accumulation: int = 1,
    masters=jnp.bfloat16,
    frozen_layers: int = 0,
    lora: Lora | None = None,
) -> int:
    network = PRMConfig(NET, dtype="bfloat16", attention="blockwise", remat=remat)
    rows, steps = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32), jax.ShapeDtypeStruct((32, 16), jnp.int32)
    labels = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    batch = PackedBatch(rows, rows, rows, steps, labels)
    parts = Partition(network, frozen_layers, lora)
    params = abstract_tree(parts.trainable, masters)
    return saved_bytes(parts, LossConfig(), params, batch, mesh=mesh, accumulation=accumulation)


INPUTS = LAYERS * ROWS * LENGTH * EMBED * 2  # of the layers, in bfloat16


def test_each_layers_input_and_nothing_else() -> None:
    assert saved() == INPUTS


def test_what_is_not_recomputed_is_kept() -> None:
    hidden = LAYERS * ROWS * LENGTH * MLP * 2
    assert saved("mlp") > saved() + INPUTS
    assert saved("none") > saved("mlp") + 2 * hidden  # gate and up, and what comes of them


@pytest.mark.parametrize("remat", ["layer", "mlp", "none"])
def test_weights_are_no_activations(remat: str) -> None:
    """Neither as they are nor rounded for the network's products."""
    assert saved(remat, masters=jnp.float32) == saved(remat)


def test_a_device_keeps_its_own_rows_and_its_share_of_a_layer() -> None:
    assert saved(accumulation=4) == saved() / 4
    assert saved(mesh={"data": 2, "fsdp": 4, "tensor": 1}) == saved() / 8
    assert saved(mesh={**ONE, "tensor": 2}) == saved()  # the residual stream is on both
    assert saved("none", {**ONE, "tensor": 2}) < 0.75 * saved("none")


ADAPTERS = Lora(16, 32.0, ("query", "down"))


def test_frozen_layers_keep_nothing() -> None:
    """Their share is gone, with adapters above them or without, and adapters alone save nothing of the inputs."""
    assert saved(frozen_layers=6) == saved(frozen_layers=6, lora=ADAPTERS) == saved() * (LAYERS - 6) / LAYERS
    assert saved(lora=ADAPTERS, masters=jnp.float32) == saved()


def test_adapters_keep_less_of_a_layer_than_its_weights_do() -> None:
    """The gradient of a frozen matrix would need its input; that of B needs A x, of the rank's width."""
    full, adapted = saved("none"), saved("none", lora=ADAPTERS, masters=jnp.float32)
    products = LAYERS * ROWS * LENGTH * ADAPTERS.rank * 2
    assert adapted < full + len(ADAPTERS.targets) * products
    assert adapted < saved("none", lora=Lora(32, 32.0, ADAPTERS.targets), masters=jnp.float32)
