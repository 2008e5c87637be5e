"""python bench/frozen_layers.py --model=DIRECTORY --train_data=FILE --layers=K --cache=DIRECTORY --output=FILE.json

Tokens per second and peak memory of training steps: everything trained, K layers frozen, and their output read from a
cache, which is filled before the first step. `python -m cfprm_jax.train` runs in a process of its own for each and ends
after its last step; the three take turns, --rounds times. Tokens are computed ones, over the time from the end of the
first step, which compiles, to the end of the last. Flags of train go behind --.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from common import ProgramError, positive, run_main, take_turns, write_json

_FLAGS = (
    *("--loss=bce", "--label_weight=node", "--record_chunk=0", "--row_shapes=1", "--eval_fraction=0"),
    *("--dtype=float32", "--remat=none", "--learning_rate=2e-5", "--log_every=1"),
)
_STEP = re.compile(r"^step (\d+)/(\d+) ")
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def run(flags: Sequence[str]) -> dict[str, float]:
    """Tokens/s of the steps after the first, and the peak of the memory in GiB, of one run."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "cfprm_jax.train", *_FLAGS, *flags, f"--output_dir={directory}/run"]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        ends = []
        for line in process.stdout or ():
            match = _STEP.match(line)
            if match:
                ends.append(time.monotonic())
                if match[1] == match[2]:
                    break
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
        process.wait()
        if len(ends) < 2:
            raise ProgramError(f"{' '.join(command)} ended before its second step, with status {process.returncode}")
        lines = (pathlib.Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
        if len(lines) < len(ends):
            raise RuntimeError(f"{len(ends)} steps, but {len(lines)} lines of metrics")
    tokens = sum(json.loads(line)["tokens_computed"] for line in lines[1 : len(ends)])
    peak = _PEAK.search(status)
    assert peak is not None
    return {"tokens_per_second": tokens / (ends[-1] - ends[0]), "peak_gib": int(peak[1]) / 2**20}


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train_data", required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--steps", type=positive, default=4)
    parser.add_argument("--batch_tokens", type=positive, default=1024)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--output", default="")
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    shared = [
        *(f"--model={given.model}", f"--train_data={given.train_data}", f"--max_steps={given.steps}"),
        *(f"--batch_tokens={given.batch_tokens}", *given.flags),
    ]
    frozen = [*shared, f"--frozen_layers={given.layers}"]
    sides = {
        "all trained": lambda: run(shared),
        "frozen": lambda: run(frozen),
        "frozen, cached": lambda: run([*frozen, f"--cache_frozen={given.cache}"]),
    }
    found = take_turns(sides, given.rounds)
    for name, rounds in found.items():
        rates = [one["tokens_per_second"] for one in rounds]
        print(
            f"{name:<16}{', '.join(f'{r:,.0f}' for r in rates)} tokens/s, {max(r['peak_gib'] for r in rounds):.1f} GiB"
        )
    write_json(given.output, figures=json.loads(json.dumps(found)))


if __name__ == "__main__":
    run_main(main)
