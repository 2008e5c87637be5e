"""Which directories a run may use."""

from __future__ import annotations

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.training import run_directory


def test_new_directories(tmp_path) -> None:
    assert run_directory.check(str(tmp_path / "new"), resume="never") == tmp_path / "new"
    (tmp_path / "notes.txt").touch()
    assert run_directory.check(str(tmp_path), resume="never") == tmp_path
    assert not (tmp_path / "new").exists()


def test_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="--output_dir is missing"):
        run_directory.check("", resume="never")
    with pytest.raises(UserError, match=r"--resume=always: .* holds no run to go on with"):
        run_directory.check(str(tmp_path), resume="always")
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"holds another run \(config.json\).*--resume"):
        run_directory.check(str(tmp_path), resume="never")
    assert run_directory.check(str(tmp_path), resume="always") == tmp_path
    with pytest.raises(UserError, match="is a file"):
        run_directory.check(str(tmp_path / "config.json"), resume="never")
