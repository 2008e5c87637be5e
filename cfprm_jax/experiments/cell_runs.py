"""Runs the cells of a grid that have no result yet, and keeps results; several processes may share them."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cfprm_jax.experiments.grid import Cell
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import atomic, config_files, locks
from cfprm_jax.runtime.progress import duration

_Result = TypeVar("_Result")
_OPTIONS = "train.flags"


def run_cells(
    grid: Sequence[Cell],
    directory: Callable[[Cell], pathlib.Path],
    load: Callable[[Cell], _Result | None],
    run: Callable[[Cell], tuple[_Result, float]],
    *,
    line: Callable[[_Result], str],
    log: Callable[[str], None],
    after: Callable[[Sequence[_Result]], object] = lambda _: None,
) -> list[_Result]:
    """The results of all cells, in the order of the grid; several processes may share the work.

    Args:
      directory: of a cell, where its lock is.
      load: its result, if there is one already.
      run: runs it; the result, and seconds.
      line: describes a result for the log.
      after: called after each cell that was run, with all results so far in the order of the grid.
    """
    found: dict[Cell, _Result] = {}
    started, ran = time.monotonic(), 0
    while len(found) < len(grid):
        progressed = False
        for cell in grid:
            if cell in found:
                continue
            with _claimed(directory(cell)) as claimed:
                if not claimed:
                    continue
                progressed = True
                result = load(cell)
                fresh = result is None
                if result is None:
                    result, seconds = run(cell)
                    ran += 1
                    left = (time.monotonic() - started) / ran * (len(grid) - len(found) - 1)
                    log(
                        f"cell        {len(found) + 1}/{len(grid)} {cell.name}: {line(result)}, {seconds:.1f} s; "
                        f"left {duration(left)} at most"
                    )
                found[cell] = result
                if fresh:
                    after([found[cell] for cell in grid if cell in found])
        if not progressed:
            time.sleep(1.0)  # another process has the rest
    return [found[cell] for cell in grid]


class StoredResult(NamedTuple):
    """A result as it is kept: a summary for JSON, with "fingerprint" and "steps" of the cell, and arrays by name."""

    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


def write_result(path: pathlib.Path, result: StoredResult, config: TrainConfig) -> None:
    """One file, the same bytes for the same numbers, whole or not there; beside it the options of the run."""
    atomic.write_text(path.with_name(_OPTIONS), config_files.flag_file(config))
    content = io.BytesIO()
    stored: dict[str, Any] = {"summary": np.array(json.dumps(result.summary)), **result.arrays}
    np.savez_compressed(content, **stored)
    atomic.write_bytes(path, content.getvalue())


def read_result(path: pathlib.Path, fingerprint: Callable[[], str]) -> StoredResult | None:
    """The result in a file; None if there is no file, its cell had another fingerprint, or its run was cut short."""
    if not path.exists():
        return None
    with np.load(path) as stored:
        summary = json.loads(str(stored["summary"]))
        arrays = {name: stored[name] for name in stored.files if name != "summary"}
    if summary["fingerprint"] != fingerprint() or _cut_short(path.with_name(_OPTIONS), summary["steps"]):
        return None
    return StoredResult(summary, arrays)


def _cut_short(options: pathlib.Path, steps: int) -> bool:
    """Whether a run has fewer steps than its options ask for, as earlier versions left those whose passes ended."""
    asked = re.search(r"^--max_steps=(\d+)$", options.read_text(), re.MULTILINE) if options.exists() else None
    return asked is not None and steps < int(asked[1])


@contextlib.contextmanager
def _claimed(directory: pathlib.Path) -> Iterator[bool]:
    """Whether this process has the cell, which it keeps until the end of the block, however that comes."""
    directory.mkdir(parents=True, exist_ok=True)
    with locks.held(directory / "lock") as granted:
        yield granted
