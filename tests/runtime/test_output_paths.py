"""Paths that a command cannot write, which it refuses before it computes."""

from __future__ import annotations

import re

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.runtime.output_paths import require_directory, require_new_directory, require_no_input


def test_directories_that_are_or_can_be_made(tmp_path, monkeypatch) -> None:
    require_directory("--output", tmp_path)
    require_directory("--output", tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    assert require_new_directory("--output_dir", "runs/a").parts == ("runs", "a")
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name, what in (("file", "is a file"), ("link", "is a link to nothing")):
        path = tmp_path / name
        with pytest.raises(UserError, match=f"^{re.escape(f'--output_dir={path} {what}')}$"):
            require_new_directory("--output_dir", path)
        with pytest.raises(UserError, match=f"^{re.escape(f'--output={path}/a: {path} {what}')}$"):
            require_directory(f"--output={path / 'a'}", path / "a")
    with pytest.raises(UserError, match="is not empty: choose a new directory"):
        require_new_directory("--output_dir", tmp_path)


def test_an_input_is_one_by_any_name(tmp_path) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "folder").mkdir()
    require_no_input("--output", tmp_path / "out.jsonl", input=[source], judge=[])
    for name in (source, tmp_path / "link", tmp_path / "folder" / ".." / "in.jsonl"):
        with pytest.raises(UserError, match="is also a file of --judge: choose another file"):
            require_no_input("--output", name, input=[tmp_path / "other"], judge=[source])
