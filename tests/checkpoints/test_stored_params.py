"""Parameters read back alone from a state of either optimizer, in either type."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from cfprm_jax.checkpoints import checksums, saving, stored_params

pytestmark = pytest.mark.quick_compile


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_compact"])
def test_masters_come_back_exactly(setup, batch, tmp_path, optimizer: str) -> None:
    """float32: the bits of the masters; bfloat16: their rounding; on another mesh than they were saved on."""
    s = setup("data=2,fsdp=2,tensor=2", 8, optimizer=optimizer)
    state, _ = s.step(s.init(), s.put(batch()))
    masters = s.tx.masters(state.params, state.opt_state)
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=1)) as saved:
        saved.save(1, state, {}, {})
    place = setup("fsdp=2", 2, optimizer=optimizer).param_shardings
    saved = saving.read_meta(tmp_path, 1)["checksums"]
    for dtype in (jnp.float32, jnp.bfloat16):
        abstract = jax.tree.map(
            lambda x, where, d=dtype: jax.ShapeDtypeStruct(x.shape, d, sharding=where), masters, place
        )
        seen: dict[str, int] = {}
        found = stored_params.read(
            tmp_path / "checkpoints" / "1", abstract, lambda part, seen=seen: seen.update(checksums.of_state(part))
        )
        jax.tree.map(lambda x, y, d=dtype: np.testing.assert_array_equal(x, y.astype(d)), found, masters)
        kernel = found["mix"]["kernel"]
        assert kernel.dtype == dtype and kernel.sharding.is_equivalent_to(place["mix"]["kernel"], 2)
        # Everything that is read is compared, as it was stored.
        assert seen.items() <= saved.items()
        halved = {name for name, leaf in flat(state.params).items() if leaf.dtype == jnp.bfloat16}
        assert bool(halved) == (optimizer == "adamw_compact")
        assert {name for name in seen if name.startswith("opt_state/")} == {
            f"opt_state/{name}/low" for name in halved if dtype == jnp.float32
        }


def test_arrays_are_read_some_at_a_time(setup, tmp_path, monkeypatch) -> None:
    s = setup()
    state = s.init()
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=1)) as saved:
        saved.save(1, state, {}, {})
    monkeypatch.setattr(stored_params, "_TOGETHER", 600)  # bytes: the kernel of 512 alone
    groups: list[set[str]] = []
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.params)
    found = stored_params.read(tmp_path / "checkpoints" / "1", abstract, lambda part: groups.append(set(flat(part))))
    jax.tree.map(np.testing.assert_array_equal, found, state.params)
    assert len(groups) > 1 and sum(map(len, groups)) == len(flat(state.params))


def flat(tree) -> dict:
    return ocp.tree.to_flat_dict(tree, sep="/")
