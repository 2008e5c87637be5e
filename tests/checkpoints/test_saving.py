"""Checkpoints: bit-equal onto any mesh, compared before use, complete or absent."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cfprm_jax.checkpoints import orbax_files, retention, saving
from cfprm_jax.errors import UserError
from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.training import step

pytestmark = pytest.mark.quick_compile


def abstract(setup, state: step.TrainState) -> step.TrainState:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, setup.shardings)


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=2)) as opened:
        yield opened


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_compact"])
def test_restores_onto_any_mesh(setup, batch, checkpoints, optimizer: str) -> None:
    """Saved on 8 devices while training continues, restored on 4, 1 and another split of 8."""
    s = setup("data=2,fsdp=2,tensor=2", 8, optimizer=optimizer)
    state, _ = s.step(s.init(), s.put(batch()))
    kept = jax.tree.map(np.asarray, state)
    checkpoints.save(1, state, {"next": 1}, {"fingerprint": {"a": 1}, "metrics": None})
    state, _ = s.step(state, s.put(batch(seed=1)))  # the saved buffers are donated here
    checkpoints.wait()
    for mesh, devices in (("data=2,tensor=2", 4), ("data=1", 1), ("fsdp=8", 8)):
        other = setup(mesh, devices, optimizer=optimizer)
        restored = checkpoints.restore_newest(abstract(other, state))
        assert isinstance(restored.state, step.TrainState)
        jax.tree.map(np.testing.assert_array_equal, restored.state, kept)
        kernel = restored.state.opt_state["mix"]["kernel"].second
        assert kernel.sharding == other.param_shardings["mix"]["kernel"]
        assert restored.data == {"next": 1}
        assert restored.meta["fingerprint"] == {"a": 1}


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
        checkpoints.restore_newest(expected)
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
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
    leftover = checkpoints.directory / "2.orbax-checkpoint-tmp-17"
    (leftover / "state").mkdir(parents=True)
    assert saving.locate(tmp_path) == (tmp_path, 1)
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=2)) as checkpoints:
        assert checkpoints.latest == 1
        checkpoints.save(2, state, {}, {})
        checkpoints.wait()
        assert checkpoints.latest == 2
    assert saving.locate(tmp_path / "checkpoints" / "1") == (tmp_path, 1)
    assert saving.locate(tmp_path) == saving.locate(tmp_path / "checkpoints") == (tmp_path, 2)


def test_a_damaged_checkpoint_is_named(setup, tmp_path) -> None:
    s = setup()
    state = s.init()
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
        (checkpoints.directory / "1" / "state" / "_METADATA").write_text("{")
        with pytest.raises(UserError, match=r"checkpoints/1 is damaged: "):
            checkpoints.restore_newest(abstract(s, state))
        (checkpoints.directory / "1" / "meta" / "metadata").unlink()
        with pytest.raises(UserError, match=r"checkpoints/1 is damaged: "):
            saving.read_meta(tmp_path, 1)


def data_files(folder):
    """All of them: which one holds what, and what was written over and is never read, depends on timing."""
    files = [path for path in (folder / "state").rglob("d/*") if path.is_file()]
    assert len(files) > 1
    return files


def flip_bits(folder):
    """One in every 16th byte."""
    for path in data_files(folder):
        raw = bytearray(path.read_bytes())
        raw[::16] = bytes(byte ^ 16 for byte in raw[::16])
        path.write_bytes(raw)


def cut_off(folder):
    for path in data_files(folder):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_data(folder):
    for path in data_files(folder):
        path.unlink()


def rewrite(folder, item, change):
    """A JSON item whose text is changed."""
    path = folder / item / "metadata"
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


def without_a_checksum(folder):
    """Of one array, in a meta that is whole."""
    meta = orbax_files.read_json(folder, "meta")
    del meta["checksums"]["step"]
    orbax_files.replace_json(folder, "meta", meta)


DAMAGES = {
    "flipped bits": flip_bits,
    "data files cut off": cut_off,
    "data files gone": remove_data,
    "no manifest": lambda folder: (folder / "state" / "manifest.ocdbt").write_bytes(b""),
    "other metadata": lambda folder: (folder / "state" / "_METADATA").write_text("{}"),
    "no meta": lambda folder: (folder / "meta" / "metadata").write_text('{"a": '),
    "no position": lambda folder: (folder / "data" / "metadata").unlink(),
    "another position": lambda folder: rewrite(folder, "data", lambda text: text.replace('"next": 2', '"next": 3')),
    "a position of no checksum": lambda folder: rewrite(folder, "data", lambda text: '{"next": 2}'),
    "a checksum cut off": lambda folder: rewrite(folder, "data", lambda text: '{"sha256": "", "content": {"next": 2}}'),
    "another metric": lambda folder: rewrite(folder, "meta", lambda text: text.replace("0.8", "0.9")),
    "meta that is a list": lambda folder: rewrite(folder, "meta", lambda text: "[1]"),
    "an array of no checksum": without_a_checksum,
}


# The contents of the line, besides the checkpoint.
NAMED = {
    "no meta": "/checkpoints/2/meta/metadata: ",
    "no position": "/checkpoints/2/data/metadata",
    "another position": "/checkpoints/2/data/metadata has changed",
    "a position of no checksum": "/checkpoints/2/data/metadata has no checksum",
    "another metric": "/checkpoints/2/meta/metadata has changed",
    "meta that is a list": "/checkpoints/2/meta/metadata has no checksum",
    "an array of no checksum": "/checkpoints/2/meta/metadata has no checksum of some of: step",
    "flipped bits": "",
}


@pytest.fixture(scope="module")
def two_saved(setup, batch, tmp_path_factory):
    """A run directory with checkpoints 1 and 2, and the state of the first."""
    s, directory = setup(), tmp_path_factory.mktemp("two_saved")
    state, _ = s.step(s.init(), s.put(batch()))
    first = jax.tree.map(np.asarray, state)
    with contextlib.closing(saving.Checkpoints(directory, keep=2)) as checkpoints:
        checkpoints.save(1, state, {"next": 1}, {"name": "one", "metrics": {"auroc": 0.9}})
        state, _ = s.step(state, s.put(batch(seed=1)))
        checkpoints.save(2, state, {"next": 2}, {"name": "two", "metrics": {"auroc": 0.8}})
    return directory, first


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(setup, two_saved, tmp_path, damage: str) -> None:
    directory, first = two_saved
    shutil.copytree(directory, tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / "checkpoints" / "2")
    retention.point_to_best(tmp_path / "run", tmp_path / "run" / "checkpoints" / "2")  # a run killed before it moved
    logged: list[str] = []
    with contextlib.closing(saving.Checkpoints(tmp_path / "run", keep=2, keep_best="auroc")) as checkpoints:
        restored = checkpoints.restore_newest(abstract(setup(), first), log=logged.append)
        assert checkpoints.improves({"auroc": 0.91}) and not checkpoints.improves({"auroc": 0.9})
    assert (restored.step, restored.data, restored.meta["name"]) == (1, {"next": 1}, "one")
    assert saving.locate(tmp_path / "run" / "best") == (tmp_path / "run", 1)
    jax.tree.map(np.testing.assert_array_equal, restored.state, first)
    (line,) = logged
    if named := NAMED.get(damage):
        assert named in line.replace(str(tmp_path), "")
    assert "checkpoints/2" in line and line.endswith(f"it is set aside as {checkpoints.directory / '2.damaged'}")
    assert saving.newest(tmp_path / "run") == 1


def test_every_file_that_is_read_is_covered(setup, two_saved, tmp_path) -> None:
    """A byte changed in the middle of any file of a checkpoint is seen, or changes nothing of what is restored."""
    directory, first = two_saved
    folder = directory / "checkpoints" / "1"
    unseen = []
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        run = tmp_path / str(number)
        shutil.copytree(folder, run / "checkpoints" / "1")
        changed = run / "checkpoints" / "1" / path.relative_to(folder)
        raw = bytearray(changed.read_bytes())
        if not raw:
            continue
        raw[len(raw) // 2] ^= 1
        changed.write_bytes(raw)
        with contextlib.closing(saving.Checkpoints(run, keep=2)) as checkpoints:
            try:
                restored = checkpoints.restore_newest(abstract(setup(), first))
            except UserError:
                continue
        unseen.append(str(path.relative_to(folder)))
        jax.tree.map(np.testing.assert_array_equal, restored.state, first)
        assert (restored.data, restored.meta["name"]) == ({"next": 1}, "one")
    # Only marks and notes of Orbax's, whose content nothing depends on.
    assert not [name for name in unseen if name.startswith("state/d/") or name in ("data/metadata", "meta/metadata")]


def test_an_evaluation_that_comes_later(setup, tmp_path) -> None:
    """It is in the checkpoint as if it had been there from the start, and counts for which one is best."""
    state = setup().init()
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=1, keep_best="auroc")) as checkpoints:
        checkpoints.save(1, state, {}, {"name": "a", "metrics": {"auroc": 0.6}})
        checkpoints.save(2, state, {}, {"name": "b", "metrics": None})
        checkpoints.wait()
        before = saving.read_meta(tmp_path, 2)
        checkpoints.add_evaluation(2, {"auroc": 0.7})
        assert saving.read_meta(tmp_path, 2) == before | {"metrics": {"auroc": 0.7}}
        assert saving.locate(tmp_path / "best") == (tmp_path, 2)
        assert not checkpoints.improves({"auroc": 0.65})
        checkpoints.save(3, state, {}, {"metrics": None})
    assert retention.complete(tmp_path / "checkpoints") == [2, 3]
    assert not list((tmp_path / "checkpoints" / "2" / "meta").glob("*.new"))


def test_the_best_is_one_of_those_evaluated_on_the_same_trajectories(setup, tmp_path) -> None:
    """After a resume with other held-out data. A checkpoint of an earlier version, which does not say, counts."""
    s = setup()
    state = s.init()

    def opened(held_out):
        return contextlib.closing(saving.Checkpoints(tmp_path, keep=4, keep_best="auroc", held_out=held_out))

    with opened("hard") as checkpoints:
        checkpoints.save(1, state, {}, {"metrics": {"auroc": 0.6}})
        checkpoints.save(2, state, {}, {"metrics": None})
    with opened("easy") as checkpoints:
        checkpoints.save(3, state, {}, {"metrics": {"auroc": 0.9}})
    for held_out, best, others in (("hard", 1, "3"), ("easy", 3, "1"), ("third", None, "1, 3")):
        logged: list[str] = []
        with opened(held_out) as checkpoints:
            checkpoints.restore_newest(abstract(s, state), log=logged.append)
            assert any(f"checkpoints {others} were evaluated on other" in line for line in logged)
            assert checkpoints.improves({"auroc": 0.7}) == (best != 3)
        assert (tmp_path / "best").is_symlink() == (best is not None)
        assert best is None or saving.locate(tmp_path / "best") == (tmp_path, best)
    with opened("hard") as checkpoints:
        checkpoints.add_evaluation(2, {"auroc": 0.7})
    with opened(None) as checkpoints:
        checkpoints.save(4, state, {}, {"metrics": {"auroc": 0.8}})
    with opened("hard") as checkpoints:
        checkpoints.restore_newest(abstract(s, state))
        assert saving.locate(tmp_path / "best") == (tmp_path, 4)
        assert not checkpoints.improves({"auroc": 0.75})


def test_nothing_is_set_aside_when_none_is_whole(setup, two_saved, tmp_path) -> None:
    directory, first = two_saved
    shutil.copytree(directory, tmp_path / "run")
    for step_ in ("1", "2"):
        flip_bits(tmp_path / "run" / "checkpoints" / step_)
    checkpoints = saving.Checkpoints(tmp_path / "run", keep=2)
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged: .*; checkpoint .*checkpoints/1 is damaged: "):
        checkpoints.restore_newest(abstract(setup(), first))
    assert retention.complete(tmp_path / "run" / "checkpoints") == [1, 2]


def test_another_run_is_refused_before_an_older_checkpoint_is_tried(setup, two_saved) -> None:
    directory, first = two_saved
    seen: list[str] = []

    def refuse(meta) -> None:
        seen.append(meta["name"])
        raise UserError("another run")

    checkpoints = saving.Checkpoints(directory, keep=2)
    with pytest.raises(UserError, match="another run"):
        checkpoints.restore_newest(abstract(setup(), first), refuse)
    assert seen == ["two"]


@pytest.mark.parametrize("asked_by", ["check", "wait", "close"])
def test_a_save_that_the_disk_refuses(setup, tmp_path, asked_by: str, capfd) -> None:
    """A file size limit of 200 bytes: one error at the next call; nothing remains of it; the next save works."""
    state = setup().init()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = saving.Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, {}, {})
    checkpoints.wait()
    begin = time.monotonic()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        with pytest.raises(UserError) as error:
            checkpoints.save(2, state, {}, {})
            while asked_by == "check" and time.monotonic() < begin + 20:
                checkpoints.check()
                time.sleep(0.01)
            getattr(checkpoints, asked_by)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"cannot write checkpoint {checkpoints.directory / '2'}: File too large" in str(error.value)
    assert f"the last good one is {checkpoints.directory / '1'}" in str(error.value)
    assert [path.name for path in checkpoints.directory.iterdir()] == ["1"]
    if asked_by != "close":
        checkpoints.save(3, state, {}, {})
        checkpoints.close()
        assert retention.complete(checkpoints.directory) == [1, 3]
    assert time.monotonic() - begin < 20
    assert "Traceback" not in capfd.readouterr().err


def test_a_save_that_fails_names_the_directory(setup, tmp_path) -> None:
    state = setup().init()
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=2)) as checkpoints:
        checkpoints.directory.rmdir()
        checkpoints.directory.touch()
        with pytest.raises(
            UserError, match=r"cannot write checkpoint .*/checkpoints/1: .*Not a directory.* there is none yet"
        ):
            checkpoints.save(1, state, {}, {})
            checkpoints.wait()
        checkpoints.directory.unlink()


def test_no_checkpoint(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "checkpoints" / "7"):
        with pytest.raises(UserError, match="neither a run directory of train with a checkpoint"):
            loaded_prm.load_for_inference(path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    with pytest.raises(UserError, match=r"has no prm.json"):
        loaded_prm.load_for_inference(tmp_path)
