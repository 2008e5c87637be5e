"""The lookup on a mesh gives what one device gives, and its gradient is summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.config import DeviceConfig
from cfprm_jax.models import embedding
from cfprm_jax.sharding import rules, split_embedding

VOCAB, EMBED = 32, 16


def table_and_tokens(rows: int = 8) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(VOCAB, EMBED)), jnp.float32)
    return table, jnp.asarray(rng.integers(0, VOCAB, (rows, 12)), jnp.int32)


@pytest.mark.parametrize("mesh", ["fsdp=8", "tensor=8", "data=2,fsdp=2,tensor=2", "data=4,tensor=2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_mesh(mesh: str, dtype) -> None:
    """The values to the bit, the gradients to float32's rounding, in the table's own layout."""
    place = rules.make_mesh(DeviceConfig(mesh=f"data=1,{mesh}" if "data" not in mesh else mesh), jax.devices())
    table, tokens = table_and_tokens()
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(8, 12, EMBED)), dtype)

    def objective(take):
        return lambda table: jnp.sum(take(table, tokens, dtype).astype(jnp.float32) * weight)

    np.testing.assert_array_equal(split_embedding.take(table, tokens, dtype, place), table[tokens].astype(dtype))
    one = jax.jit(jax.grad(objective(embedding.take)))(table)
    many = jax.jit(jax.grad(objective(lambda *a: split_embedding.take(*a, place))))(table)
    np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one, jax.grad(objective(lambda t, i, d: t[i].astype(d)))(table), rtol=1e-5, atol=1e-6)


def test_a_bfloat16_table_counts_every_token() -> None:
    """A thousand equal tokens: a sum in bfloat16 would stop at 256."""
    table = jnp.zeros((4, 2), jnp.bfloat16)
    tokens = jnp.full((8, 125), 3, jnp.int32)
    place = rules.make_mesh(DeviceConfig(mesh="data=2,fsdp=2,tensor=2"), jax.devices())
    for take in (embedding.take, lambda *a: split_embedding.take(*a, place)):
        grad = jax.jit(jax.grad(lambda t, take=take: take(t, tokens, jnp.bfloat16).sum(dtype=jnp.float32)))(table)
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(grad, jnp.asarray([[0, 0], [0, 0], [0, 0], [1000, 1000]], jnp.bfloat16))


def test_rows_that_the_mesh_does_not_divide() -> None:
    """Scoring may have any number of them."""
    place = rules.make_mesh(DeviceConfig(mesh="data=1,fsdp=8"), jax.devices())
    table, tokens = table_and_tokens(rows=3)
    found = rules.constrain_activations(place).embed(table, tokens, jnp.float32)
    np.testing.assert_array_equal(found, table[tokens])
