"""The quickstart over several seeds: is the trained PRM ahead of majority vote and pass@1 by more than the intervals?

    python bench/quickstart_seeds.py [--seeds=5] [--output_dir=runs/quickstart_seeds] [--output=FILE.json]

Every seed has a world, a model and an order of its own. Prints a Markdown table of Best-of-N accuracy (minimum of the
step scores) in %, with 95 % intervals, and exits with 1 if an interval of the PRM touches one of majority vote or
pass@1; and one of the mean over seeds and its standard deviation. A seed whose results are there already is not run
again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from common import positive, run_main, write_json

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = {
    "best of n, min": ("best_of_n", "min"),
    "best of n, last": ("best_of_n", "last"),
    "weighted vote, min": ("weighted_vote", "min"),
    "majority vote": ("majority", None),
    "pass@1": ("pass_at_1", None),
    "oracle": ("oracle", None),
}


def train(seed: int, directory: pathlib.Path) -> float:
    """Seconds that the quickstart took as a whole process."""
    command = [sys.executable, "-m", "cfprm_jax.train", f"--flagfile={ROOT / 'configs' / 'quickstart.flags'}"]
    started = time.monotonic()
    subprocess.run(
        [*command, f"--seed={seed}", f"--output_dir={directory}"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
    )
    return round(time.monotonic() - started, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--output_dir", type=pathlib.Path, default=pathlib.Path("runs/quickstart_seeds"))
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args()

    print("| seed | seconds | n | best of n, min | majority vote | pass@1 | ahead of both |")
    print("|---|---|---|---|---|---|---|")
    found, all_ahead = [], True
    for seed in range(options.seeds):
        directory = (options.output_dir / str(seed)).resolve()
        results = directory / "best_of_n" / "results.json"
        seconds = None if results.exists() else train(seed, directory)
        rows = json.loads(results.read_text())["rows"]
        found.append({"seed": seed, "seconds": seconds, "rows": rows})
        for n in sorted({row["n"] for row in rows}):
            at = {(row["method"], row["aggregation"]): row for row in rows if row["n"] == n}
            prm, others = at["best_of_n", "min"], [at["majority", None], at["pass_at_1", None]]
            ahead = all(prm["ci95"][0] > other["ci95"][1] for other in others)
            all_ahead &= ahead
            cells = [
                f"{100 * row['accuracy']:.1f} [{100 * row['ci95'][0]:.1f}, {100 * row['ci95'][1]:.1f}]"
                for row in (prm, *others)
            ]
            print(f"| {seed} | {seconds or ''} | {n} | {' | '.join(cells)} | {'yes' if ahead else 'no'} |", flush=True)
    sizes = sorted({row["n"] for row in found[0]["rows"]})
    print(f"\n| method | {' | '.join(f'n = {n}' for n in sizes)} |\n|---|{'---|' * len(sizes)}")
    for name, key in METHODS.items():
        cells = []
        for n in sizes:
            over_seeds = [
                100 * row["accuracy"]
                for seed in found
                for row in seed["rows"]
                if row["n"] == n and (row["method"], row["aggregation"]) == key
            ]
            spread = statistics.stdev(over_seeds) if len(over_seeds) > 1 else 0.0
            cells.append(f"{statistics.mean(over_seeds):.1f} ± {spread:.1f}")
        print(f"| {name} | {' | '.join(cells)} |")
    write_json(options.output, seeds=found)
    return 0 if all_ahead else 1


if __name__ == "__main__":
    run_main(main)
