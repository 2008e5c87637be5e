"""Atomic files: old content or new, on full and read-only disks, and whenever the process is killed."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import signal
import stat
import subprocess
import sys

import pytest

from cfprm_jax.runtime import atomic

ROOT = pathlib.Path(__file__).resolve().parents[2]


def names(directory: pathlib.Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_content_is_replaced(tmp_path) -> None:
    path = tmp_path / "a.json"
    atomic.write_json(path, {"a": "é"})
    assert path.read_bytes() == b'{\n  "a": "\xc3\xa9"\n}\n'
    atomic.write_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == {"a.json"}
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_what_utf8_cannot_hold_is_escaped() -> None:
    for value in ({"a": "\ud800"}, ["\ud83d", "é"]):
        assert json.loads(atomic.encode_json(value)) == value


def test_an_exception_leaves_what_was_there(tmp_path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic.writing(path) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and names(tmp_path) == {"a"}


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/target")
    for text in ("one", "two"):
        atomic.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "target").read_text() == text


def test_what_is_no_regular_file_is_written_to(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic.write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(OSError) as error:
        atomic.write_text("/dev/full", "text")
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, "/dev/full")


def test_errors_name_the_file(tmp_path) -> None:
    for path in (tmp_path / "nowhere" / "a", tmp_path):
        with pytest.raises(OSError) as error:
            atomic.write_text(path, "text")
        assert error.value.filename == str(path)
    assert names(tmp_path) == set()


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 KiB, and what remounts it with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> None:
        done = subprocess.run(["mount", *options, "tmpfs", str(folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")

    try:
        mount("-t", "tmpfs", "-o", "size=64k")
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    yield folder, lambda options: mount("-o", f"remount,{options}")
    subprocess.run(["umount", str(folder)], check=False)


@pytest.mark.parametrize("way", ["full", "read-only"])
def test_a_disk_that_takes_nothing(disk, way: str) -> None:
    folder, remount = disk
    atomic.write_text(folder / "run.flags", "--old=1\n")
    if way == "full":
        with pytest.raises(OSError):
            (folder / "filler").write_bytes(b"x" * 2**17)
    else:
        remount("ro")
    with pytest.raises(OSError) as error:
        atomic.write_text(folder / "run.flags", "--new=1\n" * 1000)
    assert error.value.errno == (errno.ENOSPC if way == "full" else errno.EROFS)
    assert error.value.filename == str(folder / "run.flags")
    assert (folder / "run.flags").read_text() == "--old=1\n"
    assert names(folder) == {"run.flags"} | ({"filler"} if way == "full" else set())
    with pytest.raises(OSError), atomic.new_directory(folder / "out") as partial:
        atomic.write_text(partial / "a", "x" * 1000)
    assert "out" not in names(folder)


KILLED = """
import os, signal, sys
from cfprm_jax.runtime import atomic
from cfprm_jax import flags
from cfprm_jax.runtime import config_files
from cfprm_jax.run.options import TrainConfig

function, number, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
before, calls = getattr(os, function), 0

def dies(*arguments, **options):
    global calls
    calls += 1
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return before(*arguments, **options)

setattr(os, function, dies)
config = flags.parse(TrainConfig, ["train", f"--output_dir={directory}", "--seed=2"])
config_files.write_config(config, directory)
"""


def test_a_kill_between_writes_leaves_old_flags_or_new(tmp_path) -> None:
    """At every fsync and every rename of write_config: run.flags can be read by --flagfile, and is one of the two."""
    from cfprm_jax import flags
    from cfprm_jax.run.options import TrainConfig
    from cfprm_jax.runtime import config_files

    old = flags.parse(TrainConfig, ["train", f"--output_dir={tmp_path}", "--seed=1"])
    new = flags.parse(TrainConfig, ["train", f"--output_dir={tmp_path}", "--seed=2"])
    config_files.write_config(old, tmp_path)
    seeds = []
    for function, number in [(f, n) for f in ("fsync", "replace") for n in range(1, 6)]:
        config_files.write_config(old, tmp_path)
        arguments = [sys.executable, "-c", KILLED, function, str(number), str(tmp_path)]
        status = subprocess.run(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
        if status == 0:  # fewer calls than that
            continue
        assert status == -signal.SIGKILL
        found = flags.parse(TrainConfig, ["train", f"--flagfile={tmp_path / 'run.flags'}"])
        assert config_files.as_dict(found) in (config_files.as_dict(old), config_files.as_dict(new))
        assert json.loads((tmp_path / "config.json").read_text())["seed"] in (1, 2)
        seeds.append(found.run.seed)
    assert {1, 2} == set(seeds)


def test_a_directory_is_whole_or_not_there(tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), atomic.new_directory(tmp_path / "a") as partial:
        (partial / "file").touch()
        raise ZeroDivisionError
    assert names(tmp_path) == set()
    (tmp_path / "a").mkdir()  # an empty one may be there
    with atomic.new_directory(tmp_path / "a") as partial:
        (partial / "file").write_text("1")
        assert names(tmp_path / "a") == set()
    assert names(tmp_path / "a") == {"file"} and names(tmp_path) == {"a"}
    with pytest.raises(OSError) as error, atomic.new_directory(tmp_path / "a") as partial:
        (partial / "other").touch()
    assert error.value.filename == str(tmp_path / "a")
    assert names(tmp_path / "a") == {"file"} and names(tmp_path) == {"a"}


def test_an_updated_directory_keeps_equal_files(tmp_path) -> None:
    def update(**texts: str) -> dict[str, int]:
        with atomic.updated_directory(tmp_path / "d") as scratch:
            (scratch / "inner").mkdir()
            for name, text in texts.items():
                (scratch / "inner" / name).write_text(text)
        assert names(tmp_path) == {"d"}
        return {path.name: path.stat().st_ino for path in (tmp_path / "d" / "inner").iterdir()}

    first = update(a="1", b="2")
    second = update(a="1", b="3", c="4")
    assert first["a"] == second["a"] and first["b"] != second["b"]
    assert [(tmp_path / "d" / "inner" / name).read_text() for name in "abc"] == ["1", "3", "4"]
