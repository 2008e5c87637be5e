"""Kill a training run with SIGKILL many times, at random moments, and compare it with an undisturbed one.

    python bench/kill_and_resume.py --kills=10 --seed=0 --output_dir=DIRECTORY -- TRAIN_FLAGS...
    python bench/kill_and_resume.py --processes=2 ... -- TRAIN_FLAGS...        kills one of two processes of a run

Trains once straight through and once killed and resumed (--kills times; every second kill waits for a checkpoint that
is being written). Exits 1 unless every loss in metrics.jsonl and every parameter of the last checkpoint are bit-equal.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from common import positive, run_main

from cfprm_jax.inference import loaded as loaded_prm
from cfprm_jax.run.metrics import MEASURED

# The others of a run end by themselves when one is killed, within a heartbeat's time-out and what it takes to end.
HEARTBEAT, SECONDS_TO_END = 10, 60


def start(flags: list[str], run: pathlib.Path, resume: bool, processes: int) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "cfprm_jax.train", *flags, f"--output_dir={run}"]
    if resume:
        command.append("--resume=always")
    if processes > 1:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            command.append(f"--coordinator=127.0.0.1:{listener.getsockname()[1]}")
        command += [f"--num_processes={processes}", f"--heartbeat_timeout={HEARTBEAT}"]
    return [
        subprocess.Popen(
            [*command, f"--process_id={i}"] if processes > 1 else command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(processes)
    ]


def finish(running: list[subprocess.Popen]) -> None:
    texts = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("the run failed by itself:\n" + "\n".join(texts))


def lines(run: pathlib.Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def unfinished(run: pathlib.Path) -> set[str]:
    """Checkpoints that are being written, or were when a process died."""
    folder = run / "checkpoints"
    return {p.name for p in folder.iterdir() if "tmp" in p.name} if folder.is_dir() else set()


def kill_once(
    flags: list[str], run: pathlib.Path, *, processes: int, victim: int, saving: bool, more_steps: int
) -> str:
    """Start or resume, kill one process at the moment wished for; what was there at that moment."""
    begin, left_behind = lines(run), unfinished(run)
    running = start(flags, run, (run / "config.json").exists(), processes)
    while all(process.poll() is None for process in running):
        reached = lines(run) >= begin + (1 if saving else more_steps)
        if reached and (not saving or unfinished(run) - left_behind):
            break
        time.sleep(0.0005)
    if all(process.poll() == 0 for process in running):
        return "came to its end"
    was_saving = bool(unfinished(run) - left_behind)
    running[victim].kill()
    killed = time.monotonic()
    texts = [process.communicate(timeout=SECONDS_TO_END)[0] for process in running]
    if running[victim].returncode != -9 or any(process.returncode == 0 for process in running):
        raise SystemExit("the run failed by itself, or a process did not notice:\n" + "\n".join(texts))
    others = f"; all ended {time.monotonic() - killed:.1f} s later" if processes > 1 else ""
    return f"killed at step {lines(run)}{' during a save' if was_saving else ''}{others}"


def rows(run: pathlib.Path) -> list[dict]:
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in read]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=positive, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=positive, default=1)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("flags", nargs="+", help="flags of train, after --")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    straight, killed = options.output_dir / "straight", options.output_dir / "killed"
    finish(start(options.flags, straight, False, options.processes))
    total = lines(straight)
    for number in range(options.kills):
        more = rng.randint(1, max(total // options.kills, 1))
        victim = rng.randrange(options.processes)
        what = kill_once(
            options.flags,
            killed,
            processes=options.processes,
            victim=victim,
            saving=number % 2 == 1,
            more_steps=more,
        )
        print(f"{number + 1}/{options.kills}: {what}", flush=True)
    finish(start(options.flags, killed, True, options.processes))
    losses_equal = rows(straight) == rows(killed)
    a, b = (loaded_prm.load_for_inference(run, "float32").params for run in (straight, killed))
    params_equal = all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)))
    print(f"{total} lines of metrics equal: {losses_equal}; parameters bit-equal: {params_equal}")
    return 0 if losses_equal and params_equal else 1


if __name__ == "__main__":
    run_main(main)
