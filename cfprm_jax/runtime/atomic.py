"""Atomic files and directories: a name always refers to complete content, whenever the process or the machine dies.

Content is written beside the name, synced to the disk, and renamed; then the directory is synced, so that the rename
survives too. A reader sees the old content or the new one, never a part of either. What a process that was killed has
left is called .NAME.partial-PROCESS, and nothing reads it.

A link keeps pointing where it points: its target is replaced. What is no regular file, such as /dev/stdout, cannot be
replaced and is written to.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator
from typing import IO, Any

Path = str | os.PathLike[str]


def write_bytes(path: Path, content: bytes) -> None:
    """Replace the content of a file, or make it.

    Raises:
      OSError: with the name of the file, which then has the content that it had before.
    """
    with writing(path) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """As :func:`write_bytes`, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """As :func:`write_bytes`: one JSON value and a newline."""
    write_bytes(path, encode_json(value, indent))


def encode_json(value: Any, indent: int | None = None) -> bytes:
    """A JSON value and a newline, in UTF-8; ASCII where a text holds what UTF-8 cannot, as JSON's \"\\ud800\" does."""
    try:
        return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(value, indent=indent) + "\n").encode()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes that of the file when the block ends; after an exception nothing has changed.

    Raises:
      OSError: with the name of the file.
    """
    path = pathlib.Path(path)
    target = path.resolve() if path.is_symlink() else path
    with _named(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as file:
                yield file
            return
        partial = _beside(target)
        try:
            # "x": the permissions of a new file, and never somebody else's.
            with partial.open("xb") as file:
                yield file
                sync(file)
            rename(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[pathlib.Path]:
    """A directory to fill, which takes its name when the block ends; after an exception it is gone.

    The name must be free or that of an empty directory when the block ends.
    """
    target = pathlib.Path(path).absolute()
    target = target.resolve() if target.is_symlink() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target)
    partial.mkdir()
    try:
        yield partial
        sync_tree(partial)
        with _named(target):
            rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextlib.contextmanager
def updated_directory(path: Path) -> Iterator[pathlib.Path]:
    """An empty directory to fill; at the end each of its files takes its place below path, unless it is there already.

    A directory that is not there yet appears whole. In one that is there, a file at a time is replaced, files of equal
    content are left alone, and other files stay.
    """
    target = pathlib.Path(path)
    if not target.exists():
        with new_directory(target) as partial:
            yield partial
        return
    scratch = _beside(target.absolute())
    scratch.mkdir()
    try:
        yield scratch
        sync_tree(scratch)
        for source in sorted(file for file in scratch.rglob("*") if file.is_file()):
            place = target / source.relative_to(scratch)
            if place.is_file() and filecmp.cmp(source, place, shallow=False):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with _named(place):
                rename(source, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Give a synced file or directory its name, replacing a file of that name, so that it survives a crash."""
    os.replace(source, target)  # noqa: PTH105 -- pathlib's replace is the same; this names the atomicity
    sync_directory(pathlib.Path(target).parent)


def sync(file: IO[Any]) -> None:
    """Everything that was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, where the file system supports that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """All files below a directory, and their names, are on the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with (pathlib.Path(folder) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(folder)


def _beside(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    """An OSError of the block names the file that was to be written, not the one beside it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error
