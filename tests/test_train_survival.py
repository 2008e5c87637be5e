"""Runs that lose their disk, their newest checkpoint or their place, in processes of their own; and what they keep."""

from __future__ import annotations

import pathlib
import random
import re
import shutil
import subprocess
import time

import pytest
from tiny_runs import before_step, finish, params, rows, same_result, wait_for_step

from cfprm_jax.checkpoints import retention, saving


@pytest.fixture
def small_disk(tmp_path):
    """Make a file system of a given size in bytes, and change its size later."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(size: int, *options: str) -> pathlib.Path:
        mounted = subprocess.run(
            ["mount", *options, "-o", f"{'remount,' if folder.is_mount() else ''}size={size}", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
        )
        if mounted.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        return folder

    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    yield lambda size: resize(size, "-t", "tmpfs")
    subprocess.run(["umount", str(folder)], check=False)


def occupied(folder: pathlib.Path) -> int:
    """Bytes that the files of a folder take on a disk with pages of 4096."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_costs_nothing_that_was_saved(tiny, small_disk) -> None:
    """Room for two checkpoints, not three: one line, no traceback, no hang; with more room the run resumes."""
    straight, _ = tiny.straight()
    # How many files Orbax merges differs by what else the machine does, and a checkpoint's size by a tenth.
    largest = max(occupied(checkpoint) for checkpoint in (straight / "checkpoints").iterdir())
    others = occupied(straight) - occupied(straight / "checkpoints")
    run = small_disk(others + largest * 5 // 2) / "run"
    given = [*tiny.arguments("full"), f"--output_dir={run}"]
    text = finish(tiny.start(given), status=2)
    failed = time.time()
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    expected = rf"error: cannot write checkpoint {run}/checkpoints/(\d+): No space left on device .*"
    step = int(re.match(expected, line)[1])
    assert f"the last good one is {run}/checkpoints/{step - 3}; --resume=auto " in line
    assert "Traceback" not in text
    assert failed - (run / "metrics.jsonl").stat().st_mtime < 20
    # Nothing of the checkpoint that failed is left to fill the disk.
    assert {path.name for path in (run / "checkpoints").iterdir()} == {str(step - 6), str(step - 3)}
    small_disk(2**24)
    assert f"after step {step - 3}" in finish(tiny.start([*given, "--resume=auto"]))
    same_result(straight, run)


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tiny) -> None:
    """Flipped bits in the weights on disk: logged, set aside, and the run ends as the undisturbed one."""
    straight, _ = tiny.straight()
    run = tiny.directory / "damaged"
    shutil.copytree(straight, run)
    newest = saving.newest(run)
    # All data files: a single one may hold, where it is changed, what was written over and is never read.
    for path in (run / "checkpoints" / str(newest)).rglob("d/*"):
        raw = bytearray(path.read_bytes())
        raw[::16] = bytes(byte ^ 4 for byte in raw[::16])
        path.write_bytes(raw)
    text = finish(tiny.start([*tiny.arguments("damaged"), "--resume=auto"]))
    before = newest - (newest % 3 or 3)  # a checkpoint every 3 steps, and one at the end
    assert re.search(
        rf"resume      checkpoint .*/checkpoints/{newest} is damaged: .*; it is set aside as .*\.damaged", text
    )
    assert f"resume      {run} after step {before}" in text
    assert (run / "checkpoints" / f"{newest}.damaged").is_dir()
    same_result(straight, run)


def compilations(text: str, function: str) -> int:
    """Of a function, by JAX's log: train_step, or step, the evaluation's."""
    return len(re.findall(rf"Compiling jit\({function}\)", text))


def test_the_best_stays_and_nothing_compiles_twice(tiny) -> None:
    """Evaluations, checkpoints and a resume: one compilation of the step and of the evaluation in each process."""
    run = tiny.directory / "best_kept"
    options = {"eval_every": 2, "keep_best": "auroc", "keep_checkpoints": 1, "checkpoint_every": 1000, "max_steps": 12}
    options["learning_rate"] = 0.1  # so large that the best is not the last
    text = finish(tiny.start(tiny.arguments("best_kept", **options), JAX_LOG_COMPILES="1"))
    assert (compilations(text, "train_step"), compilations(text, "step")) == (1, 1)
    curve = {row["step"]: row["eval_auroc"] for row in rows(run) if "eval_auroc" in row}
    best = max(curve, key=lambda step: (curve[step], -step))
    assert set(retention.complete(run / "checkpoints")) == {best, 12}
    assert saving.locate(run / "best") == (run, best)
    assert saving.read_meta(run, best)["metrics"]["auroc"] == curve[best]
    assert params(run / "best").keys() == params(run, best).keys()
    assert best < 12
    shutil.rmtree(run / "checkpoints" / "12")
    text = finish(tiny.start([*tiny.arguments("best_kept", **options), "--resume=auto"], JAX_LOG_COMPILES="1"))
    assert (compilations(text, "train_step"), compilations(text, "step")) == (1, 1)
    assert saving.locate(run / "best") == (run, best)
    assert {row["step"]: row["eval_auroc"] for row in rows(run) if "eval_auroc" in row} == curve


@pytest.mark.slow
def test_killed_with_the_compact_optimizer_and_trees_it_comes_to_the_same_end(tiny) -> None:
    """bfloat16 weights, moments in 8 bits, rounding at random, shared prefixes: all of the state, to the bit."""
    options = {"optimizer": "adamw_compact", "dtype": "bfloat16", "packing": "tree", "row_length": 384, "eval_every": 5}
    options["record_chunk"] = 0  # the solutions of a question stay together
    straight, run = tiny.directory / "compact", tiny.directory / "compact_killed"
    finish(tiny.start(tiny.arguments("compact", **options)))
    steps = [row for row in rows(straight) if "loss" in row]
    assert sum(row["tokens_computed"] for row in steps) < 0.9 * sum(row["tokens_expanded"] for row in steps)
    given = tiny.arguments("compact_killed", **options)
    process = tiny.start(given, patch=before_step(len(steps)))
    wait_for_step(process, run, random.randint(4, len(steps) - 4))
    process.kill()
    process.communicate()
    assert "resume      " in finish(tiny.start([*given, "--resume=auto"]))
    same_result(straight, run)
    (a, b), last = ((straight, run), saving.newest(straight))
    sums = [saving.read_meta(directory, last)["checksums"] for directory in (a, b)]
    assert any(name.endswith("/low") for name in sums[0])
    assert sums[0] == sums[1]


def test_a_disk_that_cannot_hold_the_checkpoints_is_refused_before_the_first_step(tiny, small_disk) -> None:
    run = small_disk(2**16) / "run"
    text = finish(tiny.start([*tiny.arguments("no_room"), f"--output_dir={run}"]), status=2)
    assert re.search(r"error: --output_dir: a checkpoint has .* need up to 3 at a time, .* has 64.0 KiB free", text)
    assert not run.exists()
