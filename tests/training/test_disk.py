"""Room on a disk, and the system's word when there is none."""

from __future__ import annotations

import collections
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.training import disk

STATE = {"a": jax.ShapeDtypeStruct((2**20, 256), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.int32)}  # 1 GiB


def with_free(monkeypatch, bytes_free: float) -> None:
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(int(bytes_free)))


def test_enough_room_is_not_worth_a_word(monkeypatch, tmp_path) -> None:
    with_free(monkeypatch, 3.1 * 2**30)
    assert disk.require_room(tmp_path / "not" / "yet", STATE, keep=2) == ""


def test_little_room_is_told(monkeypatch, tmp_path) -> None:
    with_free(monkeypatch, 2.5 * 2**30)
    note = disk.require_room(tmp_path, STATE, keep=2)
    assert "takes up to 1.0 GiB" in note and "2.5 GiB free" in note and "up to 3.0 GiB" in note


def test_no_room_is_refused_before_training(monkeypatch, tmp_path) -> None:
    with_free(monkeypatch, 100 * 2**20)
    with pytest.raises(UserError, match=r"--output_dir: a checkpoint takes up to 1.0 GiB, .* has 100.0 MiB free"):
        disk.require_room(tmp_path, STATE, keep=2)


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
