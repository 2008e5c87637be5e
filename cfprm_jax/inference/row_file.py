"""Resumable output files: rows are appended one by one; after a kill, the command resumes with the next row.

Rows are appended to OUTPUT.partial as plain text, because a truncated compressed file cannot be resumed. Each row is
flushed to the operating system. When all rows are written, the file is renamed to OUTPUT, or compressed into it if its
name ends in .gz. OUTPUT.config.json contains the resolved flags and a fingerprint of the inputs; resuming requires both
to be equal.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Set
from typing import IO, Any

from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, locks
from cfprm_jax.runtime.regular_files import check_output

RESUMES = ("never", "auto", "always")
RESUME_HELP = (
    "Whether to resume an interrupted --output. never: it is an error if --output exists, complete or partial. auto: "
    "resume it, or start a new one. always: it is an error if there is none."
)
_FINGERPRINT = "fingerprint"
RESOLVED = "resolved"
# Flags that no row depends on, and those whose contents are fingerprinted.
FREE_FLAGS = frozenset(
    {
        *("resume", "compile_cache_dir", "output", "model", "checkpoint", "input", "questions", "resolved"),
        *("max_truncated", "max_bad_rows", "grader_processes"),
        *("engine", "concurrency", "request_seconds", "request_retries", "write_requests", "completions"),
        "omit_neutral",  # compared as the kind of engine
    }
)


class RowFile:
    """The output of a command while it runs; see :func:`open_rows`.

    Attributes:
      done: number of rows already written.
      complete: whether the output is complete.
    """

    def __init__(self, file: IO[bytes] | None, done: int, beside: pathlib.Path) -> None:
        self._file, self._beside = file, beside
        self.done = done
        self.complete = file is None

    def require(self, name: str, value: Any) -> None:
        """Compares a value that was resolved after opening, such as the loaded checkpoint, with that of earlier rows.

        Raises:
          UserError: the earlier rows were written with another value.
        """
        held = json.loads(self._beside.read_text(encoding="utf-8"))
        resolved = held.get(RESOLVED, {})
        if self.done and resolved.get(name, value) != value:
            raise UserError(
                f"{self._beside}: the {self.done:,} rows of --output were written with {name} {resolved[name]}, found "
                f"{name} {value}: choose another file"
            )
        atomic.write_json(self._beside, {**held, RESOLVED: {**resolved, name: value}})

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that were there already, of a file that is not complete."""
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self.done):
                yield json.loads(self._file.readline())
            self._file.seek(0, 2)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row and flushes it to the operating system."""
        if self._file is None:
            raise ValueError("the file is complete")
        self._file.write(atomic.encode_json(row))
        self._file.flush()


@contextlib.contextmanager
def open_rows(
    output: str | pathlib.Path,
    resume: str,
    config: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    free: Set[str] = FREE_FLAGS,
) -> Iterator[RowFile]:
    """Opens the output of a command; it is complete when the block ends without an exception.

    Args:
      resume: one of RESUMES; see RESUME_HELP.
      config: the resolved flags.
      fingerprint: digests of model and inputs (see :func:`cfprm_jax.runtime.digests.of_paths`).
      free: flags that no row depends on.

    Raises:
      UserError: resume does not allow the state of the output; it was written with other flags, model or inputs; or
        another process is writing it.
    """
    output = pathlib.Path(output)
    check_output(output, "--output")
    partial, beside = output.with_name(f"{output.name}.partial"), output.with_name(f"{output.name}.config.json")
    _check_resume(output, partial, resume)
    description = {**config, _FINGERPRINT: dict(fingerprint)}
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.exists():
        _check_same(output, beside, description, free)
        yield RowFile(None, 0, beside)
        return
    with locks.opened(partial, "a+b") as file:
        if file is None:
            raise UserError(f"--output={output}: another process is writing it")
        if output.exists():
            partial.unlink()
            raise UserError(f"--output={output}: another process has just completed it")
        done = 0
        if _cut_to_whole_rows(file):
            before = _check_same(output, beside, description, free)
            # Flags that no row depends on may be others now; who reads them looks for those of the end.
            atomic.write_json(beside, {**before, **description})
            file.seek(0)
            done = sum(1 for _ in file)
        else:
            atomic.write_json(beside, description)
        try:
            yield RowFile(file, done, beside)
        except BaseException:
            # An empty file contains nothing to resume, and must not make the next start fail.
            if not file.tell():
                partial.unlink()
                beside.unlink()
            raise
        _finish(file, partial, output)


def _check_resume(output: pathlib.Path, partial: pathlib.Path, resume: str) -> None:
    if resume == "never" and output.exists():
        raise UserError(f"--output={output} already exists: choose another file, or remove it")
    if resume == "never" and partial.exists() and partial.stat().st_size:
        raise UserError(
            f"--output={output} is partially written ({partial.name}): resume with --resume=auto, choose another file, "
            "or remove it"
        )
    if resume == "always" and not (output.exists() or partial.exists()):
        raise UserError(f"--resume=always: nothing to resume, neither {output} nor {partial.name} exists")


def _check_same(
    output: pathlib.Path, beside: pathlib.Path, description: Mapping[str, Any], free: Set[str]
) -> dict[str, Any]:
    """The description of the existing rows; UserError unless they were written with the same flags and inputs."""
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
        differ = [
            f"--{name}" if name != _FINGERPRINT else _changed(before.get(name), description[name])
            for name in {**description, **before}
            if name not in free and before.get(name) != json.loads(json.dumps(description)).get(name)
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--output={output}: cannot read {beside.name}, the flags of its rows: {error}") from error
    if differ:
        raise UserError(f"--output={output} was written with another {', '.join(differ)}: choose another file")
    return before


def _changed(before: Any, now: Mapping[str, str]) -> str:
    before = before if isinstance(before, dict) else {}
    return ", ".join(name for name in now if before.get(name) != now[name]) or "set of inputs"


def _cut_to_whole_rows(file: IO[bytes]) -> int:
    """Truncates an incomplete last row; returns the remaining bytes."""
    file.seek(0)
    end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        end += len(line)
    file.truncate(end)
    file.seek(end)
    return end


def _finish(file: IO[bytes], partial: pathlib.Path, output: pathlib.Path) -> None:
    atomic.sync(file)
    if output.suffix != ".gz":
        atomic.rename(partial, output)
        return
    file.seek(0)
    # No name and no time inside: the same rows give the same file.
    with atomic.writing(output) as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as target:
        shutil.copyfileobj(file, target, 1 << 20)
    partial.unlink()
