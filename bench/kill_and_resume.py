"""Kill a training run with SIGKILL many times, at random moments, and compare it with an undisturbed one.

    python bench/kill_and_resume.py --kills=10 --seed=0 --output_dir=DIRECTORY -- TRAIN_FLAGS...

Trains once straight through and once killed and resumed (--kills times; every second kill waits for a checkpoint that
is being written). Exits 1 unless every loss in metrics.jsonl and every parameter of the last checkpoint are bit-equal.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

import jax
import numpy as np

from cfprm_jax.training import checkpoint

TIMING = ("steps_per_second", "tokens_per_second", "expanded_tokens_per_second")


def start(flags: list[str], run: pathlib.Path, resume: bool) -> subprocess.Popen:
    command = [sys.executable, "-m", "cfprm_jax.train", *flags, f"--output_dir={run}"]
    return subprocess.Popen(
        [*command, "--resume=always"] if resume else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(run: pathlib.Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def unfinished(run: pathlib.Path) -> set[str]:
    """Checkpoints that are being written, or were when a process died."""
    folder = run / "checkpoints"
    return {p.name for p in folder.iterdir() if "tmp" in p.name} if folder.is_dir() else set()


def kill_once(flags: list[str], run: pathlib.Path, during_a_save: bool, more_steps: int) -> str:
    """Start or resume, kill at the moment wished for; what was there at that moment."""
    begin, left_behind = lines(run), unfinished(run)
    process = start(flags, run, resume=(run / "config.json").exists())
    while process.poll() is None:
        reached = lines(run) >= begin + (1 if during_a_save else more_steps)
        if reached and (not during_a_save or unfinished(run) - left_behind):
            break
        time.sleep(0.0005)
    was_saving = bool(unfinished(run) - left_behind)
    process.kill()
    text, _ = process.communicate()
    if process.returncode not in (0, -9):
        raise SystemExit(f"the run failed by itself:\n{text}")
    return f"killed at step {lines(run)}{' during a save' if was_saving else ''}"


def rows(run: pathlib.Path) -> list[dict]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMING} for row in read]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("flags", nargs="+", help="flags of train, after --")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    straight, killed = options.output_dir / "straight", options.output_dir / "killed"
    text, _ = (process := start(options.flags, straight, resume=False)).communicate()
    if process.returncode:
        raise SystemExit(text)
    total = lines(straight)
    for number in range(options.kills):
        what = kill_once(options.flags, killed, number % 2 == 1, rng.randint(1, max(total // options.kills, 1)))
        print(f"{number + 1}/{options.kills}: {what}", flush=True)
    text, _ = (process := start(options.flags, killed, resume=True)).communicate()
    if process.returncode:
        raise SystemExit(text)
    losses_equal = rows(straight) == rows(killed)
    a, b = (checkpoint.load_for_inference(run, "float32").params for run in (straight, killed))
    params_equal = all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)))
    print(f"{total} lines of metrics equal: {losses_equal}; parameters bit-equal: {params_equal}")
    return 0 if losses_equal and params_equal else 1


if __name__ == "__main__":
    sys.exit(main())
