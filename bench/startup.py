"""python bench/startup.py --model=DIRECTORY --train_data=FILE --output=FILE.json: from the command to the first step.

Starts `python -m cfprm_jax.train` in fresh processes and ends each after its first step: cold, with no compiled step
and no tokenised corpus in its caches, and warm, with those of the cold start before it. The parts of the time come
from the lines of train's log and from JAX's log of compilations. Both kinds alternate, --rounds times; medians, with
the fastest and slowest. Files are in the system's page cache from the second round on; bench/large_checkpoint.py
measures reading checkpoints that are not. Beside that: the seconds of --help and of the imports alone.

Without --model the quickstart's small one is made and trained from its random weights. Flags of train go behind --:

    python bench/startup.py --model=models/Qwen2.5-0.5B --train_data=FILE -- --batch_size=4 --max_length=512
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from common import ProgramError, positive, run_main, take_turns, write_json

# The first word of a line of train -> what is done when it stands there.
MARKS = {
    "devices": "imports, devices",
    "model": "network",
    "train": "corpus",
    "steps": "plan, held-out corpus",
    "weights": "weights",
    "step": "first step",
}
TOTAL, COMPILING = "command to first step", "of which tracing and compiling the step"
# "Finished XLA compilation of jit(train_step) in 1.25 sec", and the same of tracing and of making MLIR.
_COMPILED = re.compile(r"Finished .*\btrain_step\b.* in ([\d.e+-]+) sec")
IMPORTS = {
    "import jax": ["-c", "import jax"],
    "import cfprm_jax": ["-c", "import cfprm_jax"],
    "import cfprm_jax.train": ["-c", "import cfprm_jax.train"],
    "python -m cfprm_jax.train --help": ["-m", "cfprm_jax.train", "--help"],
}


def start(flags: Sequence[str], caches: pathlib.Path) -> dict[str, float]:
    """Seconds of each part of one start, which is ended after its first step."""
    environment = {**os.environ, "JAX_LOG_COMPILES": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as run:
        command = [
            *(sys.executable, "-m", "cfprm_jax.train", *flags, f"--output_dir={run}/run"),
            *(f"--compile_cache_dir={caches}/compiled", f"--data_cache_dir={caches}/corpora"),
            *("--max_steps=1", "--log_every=1"),  # the last step is reported before anything is evaluated or saved
        ]
        log: list[str] = []
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        reader = threading.Thread(target=lambda: log.extend(process.stderr or ()))
        reader.start()
        found = marks(process.stdout or (), lambda: time.perf_counter() - started)
        process.kill()
        process.wait()
        reader.join()
    if "step" not in found:
        raise ProgramError(f"{' '.join(command)} ended before its first step: {''.join(log)[-2000:]}")
    return parts(found, log)


def marks(lines: Iterable[str], clock: Callable[[], float]) -> dict[str, float]:
    """When each word of MARKS last began a line, up to the first step."""
    found: dict[str, float] = {}
    for line in lines:
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if word in MARKS:
            found[word] = clock()
        if word == "step":
            break
    return found


def parts(found: dict[str, float], log: Iterable[str]) -> dict[str, float]:
    """Seconds of each part, from the time of its mark and JAX's log of compilations."""
    seconds, before = {}, 0.0
    for word, name in MARKS.items():
        seconds[name] = found[word] - before
        before = found[word]
    compiled = sum(float(match[1]) for match in map(_COMPILED.search, log) if match)
    return {TOTAL: before, **seconds, COMPILING: compiled}


def whole(arguments: Sequence[str]) -> float:
    """Seconds of a Python process with these arguments."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def row(name: str, cells: Sequence[Sequence[float]]) -> str:
    texts = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in cells]
    return f"| {name} | {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="synthetic")
    parser.add_argument("--train_data", default="synthetic")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--small", action="store_true", help="one round")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("flags", nargs="*", help="flags of train, behind --")
    options = parser.parse_args()
    rounds = 1 if options.small else options.rounds
    flags = [f"--model={options.model}", f"--train_data={options.train_data}", *options.flags]

    imports = take_turns({name: (lambda a=a: whole(a)) for name, a in IMPORTS.items()}, rounds)
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as caches:
            for kind, done in starts.items():
                done.append(start(flags, pathlib.Path(caches)))
                print(f"{kind}: {done[-1][TOTAL]:.2f} s to the first step", flush=True)

    print("\n| seconds | cold | warm |\n|---|---|---|")
    names = list(starts["cold"][0])
    for name in names:
        print(row(name, [[one[name] for one in done] for done in starts.values()]))
    print("\n| seconds of a process | |\n|---|---|")
    for name, seconds in imports.items():
        print(row(name, [seconds]))
    write_json(options.output, "flax", "transformers", flags=flags, starts=starts, processes=imports)


if __name__ == "__main__":
    run_main(main)
