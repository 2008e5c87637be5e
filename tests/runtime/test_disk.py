"""Room on a disk, and the system's word when there is none."""

from __future__ import annotations

import collections
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from cfprm_jax.config import RunConfig
from cfprm_jax.errors import UserError
from cfprm_jax.runtime import disk

STATE = {"a": jax.ShapeDtypeStruct((2**20, 256), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.int32)}  # 1 GiB


def with_free(monkeypatch, bytes_free: float) -> None:
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(int(bytes_free)))


@pytest.mark.parametrize(
    ("options", "num_steps", "number"),
    [
        ({}, 5000, 3),  # two are kept, and the next is written before the oldest goes
        ({"keep_checkpoints": 4}, 5000, 5),
        ({"keep_best": "auroc"}, 5000, 4),
        ({}, 500, 1),
        ({}, 501, 2),
        ({"keep_best": "auroc"}, 500, 1),
        ({"keep_best": "auroc", "eval_every": 100}, 500, 4),
    ],
)
def test_how_many_are_there_at_a_time(options, num_steps: int, number: int) -> None:
    assert disk.checkpoints_at_a_time(RunConfig(checkpoint_every=500, **options), num_steps) == number


def test_enough_room_is_not_worth_a_word(monkeypatch, tmp_path) -> None:
    with_free(monkeypatch, 3.1 * 2**30)
    assert disk.require_room(tmp_path / "not" / "yet", STATE, RunConfig(), 5000) == ""
    with_free(monkeypatch, 1.1 * 2**30)
    assert disk.require_room(tmp_path, STATE, RunConfig(), 400) == ""
    assert disk.require_room(tmp_path, STATE, RunConfig(), 5000, present=2) == ""
    assert disk.require_room(tmp_path, STATE, RunConfig(), 5000, present=7) == ""


def test_little_room_gives_a_note(monkeypatch, tmp_path) -> None:
    with_free(monkeypatch, 2.5 * 2**30)
    assert disk.require_room(tmp_path, STATE, RunConfig(), 5000) == (
        "note: a checkpoint has 1.0 GiB before compression, --keep_checkpoints=2 need up to 3 at a time, one of them "
        f"being written, and the disk of {tmp_path} has 2.5 GiB free for 3 of them (3.0 GiB): it may get full"
    )


@pytest.mark.parametrize(
    ("free", "present", "message"),
    [
        (2.0, 0, "has 2.0 GiB free for 3 of them (3.0 GiB): make room, keep fewer checkpoints, or choose another disk"),
        (1.3, 1, "has 1.3 GiB free for 2 more of them (2.0 GiB)"),
        (0.6, 3, "has 614.4 MiB free for 1 more of them (1.0 GiB)"),
    ],
)
def test_what_cannot_fit_is_refused_before_training(monkeypatch, tmp_path, free, present, message) -> None:
    with_free(monkeypatch, free * 2**30)
    with pytest.raises(UserError, match=r"^--output_dir: a checkpoint has 1\.0 GiB before") as error:
        disk.require_room(tmp_path, STATE, RunConfig(), 5000, present)
    assert message in str(error.value)


def test_free_of_no_disk() -> None:
    assert disk.free(pathlib.Path("/nowhere/at/all")) == "an unknown number of bytes"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError('RESOURCE_EXHAUSTED: "a/b": Disk quota exceeded\n [os_error_code="122"]'), "Disk quota exceeded"),
        (ValueError("something\n  else"), "something else"),
    ],
)
def test_reason(error: Exception, reason: str) -> None:
    assert disk.reason(error) == reason
