"""An output file that grows row by row, and that a killed command goes on with: no row is lost, none is there twice.

Rows go to OUTPUT.partial, as plain text, and are handed to the system as soon as they are written. When all are there
the file takes its name, compressed if that ends in .gz; a compressed file that was cut could not be gone on with.
OUTPUT.config.json has the resolved flags, and what identifies the inputs: the same of both go on, others are refused.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import IO, Any

from cfprm_jax.errors import UserError
from cfprm_jax.runtime import atomic, locks
from cfprm_jax.runtime.regular_files import check_output

RESUMES = ("never", "auto", "always")
_FINGERPRINT = "fingerprint"
_RESOLVED = "resolved"
# Flags that no row depends on, and those whose contents the fingerprint has.
_FREE = frozenset({"resume", "compile_cache_dir", "output", "model", "checkpoint", "input", "questions", "resolved"})


class RowFile:
    """The output of a command while it runs; see :func:`open_rows`.

    Attributes:
      done: rows that were there already.
      complete: whether all are, so that nothing is left to do.
    """

    def __init__(self, file: IO[bytes] | None, done: int, beside: pathlib.Path) -> None:
        self._file, self._beside = file, beside
        self.done = done
        self.complete = file is None

    def require(self, name: str, value: Any) -> None:
        """Compare what is known only now, such as the checkpoint that was whole, with what the first rows are of.

        Raises:
          UserError: they are of another one.
        """
        held = json.loads(self._beside.read_text(encoding="utf-8"))
        resolved = held.get(_RESOLVED, {})
        if self.done and resolved.get(name, value) != value:
            raise UserError(
                f"{self._beside}: the {self.done:,} rows of --output are of {name} {resolved[name]}, and now there is "
                f"{name} {value}: name another file"
            )
        atomic.write_json(self._beside, {**held, _RESOLVED: {**resolved, name: value}})

    def write(self, row: Mapping[str, Any]) -> None:
        """Add one row; it survives the process from here on."""
        if self._file is None:
            raise ValueError("the file is complete")
        self._file.write(atomic.encode_json(row))
        self._file.flush()


@contextlib.contextmanager
def open_rows(
    output: str | pathlib.Path, resume: str, config: Mapping[str, Any], fingerprint: Mapping[str, str]
) -> Iterator[RowFile]:
    """The output of a command, which takes its name when the block ends without an exception.

    Args:
      resume: "never" refuses an output that exists or was begun, "auto" goes on with it or begins, "always" needs it.
      config: the resolved flags.
      fingerprint: what identifies model and inputs (see :func:`cfprm_jax.runtime.digests.of_paths`).

    Raises:
      UserError: what resume does not allow; an output of other flags, model or inputs; or another process at work.
    """
    output = pathlib.Path(output)
    check_output(output, "--output")
    partial, beside = output.with_name(f"{output.name}.partial"), output.with_name(f"{output.name}.config.json")
    _check_resume(output, partial, beside, resume)
    description = {**config, _FINGERPRINT: dict(fingerprint)}
    output.parent.mkdir(parents=True, exist_ok=True)
    if output.exists():
        _check_same(output, beside, description)
        yield RowFile(None, 0, beside)
        return
    with locks.opened(partial, "a+b") as file:
        if file is None:
            raise UserError(f"--output={output}: another process is writing it")
        if output.exists():
            partial.unlink()
            raise UserError(f"--output={output}: another process has just written it")
        done = 0
        if _cut_to_whole_rows(file):
            _check_same(output, beside, description)
            file.seek(0)
            done = sum(1 for _ in file)
        else:
            atomic.write_json(beside, description)
        try:
            yield RowFile(file, done, beside)
        except BaseException:
            # Nothing to go on with is no reason to refuse the next start.
            if not file.tell():
                partial.unlink()
                beside.unlink()
            raise
        _finish(file, partial, output)


def _check_resume(output: pathlib.Path, partial: pathlib.Path, beside: pathlib.Path, resume: str) -> None:
    if resume == "never" and output.exists():
        raise UserError(f"--output={output} exists already: name another file, or remove it")
    if resume == "never" and partial.exists() and partial.stat().st_size:
        raise UserError(
            f"--output={output} was begun already ({partial.name}): go on with it by --resume=auto, name another file, "
            "or remove it"
        )
    if resume == "always" and not (output.exists() or partial.exists()):
        raise UserError(f"--resume=always: there is nothing to go on with, neither {output} nor {partial.name}")


def _check_same(output: pathlib.Path, beside: pathlib.Path, description: Mapping[str, Any]) -> None:
    """UserError unless the rows that are there are of the same flags and inputs."""
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
        differ = [
            f"--{name}" if name != _FINGERPRINT else _changed(before.get(name), description[name])
            for name in {**description, **before}
            if name not in _FREE and before.get(name) != json.loads(json.dumps(description)).get(name)
        ]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--output={output}: {beside.name} does not say what the rows there are of: {error}") from error
    if differ:
        raise UserError(f"--output={output} was begun with another {', '.join(differ)}: name another file")


def _changed(before: Any, now: Mapping[str, str]) -> str:
    before = before if isinstance(before, dict) else {}
    return ", ".join(name for name in now if before.get(name) != now[name]) or "set of inputs"


def _cut_to_whole_rows(file: IO[bytes]) -> int:
    """Drop what a kill left of a row; how many bytes remain."""
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
