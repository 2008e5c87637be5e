"""Parameters read back alone from a state of either optimizer, in either type."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from cfprm_jax.checkpoints import saving, stored_params


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_compact"])
def test_masters_come_back_exactly(setup, batch, tmp_path, optimizer: str) -> None:
    """float32: the bits of the masters; bfloat16: their rounding; on another mesh than they were saved on."""
    s = setup("data=2,fsdp=2,tensor=2", 8, optimizer=optimizer)
    state, _ = s.step(s.init(), s.put(batch()))
    masters = s.tx.masters(state.params, state.opt_state)
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=1)) as saved:
        saved.save(1, state, {}, {})
    place = setup("fsdp=2", 2, optimizer=optimizer).param_shardings
    directory = epath.Path(tmp_path / "checkpoints/1/state")
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        tree = handler.metadata(directory).tree
        for dtype in (jnp.float32, jnp.bfloat16):
            wanted = jax.tree.map(
                lambda x, where, d=dtype: jax.ShapeDtypeStruct(x.shape, d, sharding=where), masters, place
            )
            found = stored_params.read(handler, directory, tree, wanted)
            jax.tree.map(lambda x, y, d=dtype: np.testing.assert_array_equal(x, y.astype(d)), found, masters)
            kernel = found["mix"]["kernel"]
            assert kernel.dtype == dtype and kernel.sharding.is_equivalent_to(place["mix"]["kernel"], 2)
