"""Checkpoints: bit-equal onto any mesh, compared before use, complete or absent."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.training import checkpoint, step


def abstract(setup, state: step.TrainState) -> step.TrainState:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, setup.shardings)


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as opened:
        yield opened


def test_restores_onto_any_mesh(setup, batch, checkpoints) -> None:
    """Saved on 8 devices while training goes on, restored on 4, 1 and another split of 8."""
    s = setup("data=2,fsdp=2,tensor=2", 8)
    state, _ = s.step(s.init(), s.put(batch()))
    kept = jax.tree.map(np.asarray, state)
    checkpoints.save(1, state, {"next": 1}, {"fingerprint": {"a": 1}, "metrics": None})
    state, _ = s.step(state, s.put(batch(seed=1)))  # the saved buffers are donated here
    checkpoints.wait()
    for mesh, devices in (("data=2,tensor=2", 4), ("data=1", 1), ("fsdp=8", 8)):
        other = setup(mesh, devices)
        restored = checkpoints.restore(1, abstract(other, state))
        assert isinstance(restored.state, step.TrainState)
        jax.tree.map(np.testing.assert_array_equal, restored.state, kept)
        kernel = restored.state.opt_state[0].mu["mix"]["kernel"]
        assert kernel.sharding == other.param_shardings["mix"]["kernel"]
        assert restored.data == {"next": 1}
    assert checkpoints.meta(1)["fingerprint"] == {"a": 1}


def test_keeps_the_newest(setup, checkpoints) -> None:
    state = setup().init()
    assert checkpoints.latest is None
    for k in (1, 2, 3):
        checkpoints.save(k, state, {}, {})
    checkpoints.wait()
    assert checkpoints.latest == 3
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["2", "3"]


def test_every_difference_is_listed(setup, checkpoints) -> None:
    s = setup()
    state = s.init()
    checkpoints.save(5, state, {}, {})
    checkpoints.wait()
    expected = abstract(s, state)
    kernel = expected.params["mix"]["kernel"]
    expected.params["mix"]["kernel"] = jax.ShapeDtypeStruct((16, 9), kernel.dtype, sharding=kernel.sharding)
    expected.params["mix"]["more"] = kernel
    del expected.params["mix"]["bias"]
    expected.params["embedding"] = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16, sharding=kernel.sharding)
    with pytest.raises(UserError) as error:
        checkpoints.restore(5, expected)
    for text in (
        "params/mix/kernel: expected float32 [16, 9], found float32 [16, 8]",
        "params/mix/more: expected float32 [16, 8], found nothing",
        "params/mix/bias: expected nothing, found float32 [16]",
        "params/embedding: expected bfloat16 [64, 8], found float32 [64, 8]",
    ):
        assert text in str(error.value)


def test_an_unfinished_save_is_not_there(setup, tmp_path) -> None:
    """What a kill in the middle of a save leaves behind is neither found nor in the way of the next save."""
    state = setup().init()
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
    leftover = checkpoints.directory / "2.orbax-checkpoint-tmp-17"
    (leftover / "state").mkdir(parents=True)
    assert checkpoint.locate(tmp_path) == (tmp_path, 1)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
        assert checkpoints.latest == 1
        checkpoints.save(2, state, {}, {})
        checkpoints.wait()
        assert checkpoints.latest == 2
    assert checkpoint.locate(tmp_path / "checkpoints" / "1") == (tmp_path, 1)
    assert checkpoint.locate(tmp_path) == checkpoint.locate(tmp_path / "checkpoints") == (tmp_path, 2)


def test_a_damaged_checkpoint_is_named(setup, tmp_path) -> None:
    s = setup()
    state = s.init()
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
        (checkpoints.directory / "1" / "state" / "_METADATA").write_text("{")
        with pytest.raises(UserError, match=r"checkpoints/1 is damaged: "):
            checkpoints.restore(1, abstract(s, state))
        (checkpoints.directory / "1" / "meta" / "metadata").unlink()
        with pytest.raises(UserError, match=r"checkpoints/1 is damaged: "):
            checkpoints.meta(1)


def test_a_save_that_fails_names_the_directory(setup, tmp_path) -> None:
    state = setup().init()
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.directory.rmdir()
        checkpoints.directory.touch()
        with pytest.raises(UserError, match=r"cannot write a checkpoint into .*/checkpoints: "):
            checkpoints.save(1, state, {}, {})
            checkpoints.wait()
        checkpoints.directory.unlink()


def test_no_checkpoint(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "checkpoints" / "7"):
        with pytest.raises(UserError, match="neither a run directory of train with a checkpoint"):
            checkpoint.load_for_inference(path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no prm.json"):
        checkpoint.load_for_inference(tmp_path)
