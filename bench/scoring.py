"""Throughput of `score` in candidates per second, compared with a plain scorer in transformers.

    python bench/scoring.py --peer=SCRIPT --model=DIRECTORY --candidates=FILE --output=RESULT.json

SCRIPT is called as `SCRIPT DIRECTORY FILE --questions=N --per_question=M --output=SCORES` and prints one JSON line with
"candidates_per_s"; SCORES is a list of {"question", "candidate", "step_scores"}. DIRECTORY is an export of the format
token_classification in float32. Both sides score the same candidates with the same weights on the CPU, in turn,
--rounds times each, each in a process of its own on --threads cores. Time here is that of tokenising, packing,
computing and reading scores out; compiling and reading weights are left out. Ends with the largest difference between
two scores. --packings=tree,sequence,none are as many sides of ours: what a side has over the next is worth of shared
prefixes, and of rows that hold several. --small is a quick look. Needs what SCRIPT needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from common import last_json, positive, run_main, select_devices, write_json

from cfprm_jax.config import PACKINGS


def ours(options: argparse.Namespace) -> None:
    """`score`'s own parts, in this process; prints a JSON line and writes the scores."""
    from cfprm_jax.config import DeviceConfig
    from cfprm_jax.inference.load import open_prm
    from cfprm_jax.inference.rows import ScoringCounts, score_rows
    from cfprm_jax.inference.scorer import Scorer
    from cfprm_jax.sharding import rules

    mesh = rules.make_mesh(DeviceConfig(), select_devices()[:1])
    loaded = open_prm(options.model, "float32", mesh=mesh)
    loaded = dataclasses.replace(loaded, encoding=dataclasses.replace(loaded.encoding, max_length=options.max_length))
    scorer = Scorer(loaded, options.packings, options.batch_rows, mesh=mesh)
    text = pathlib.Path(options.candidates).read_text().splitlines()
    if options.compile:  # the same shapes, so that the caches of compiled programs have them
        list(score_rows([(json.loads(line), "") for line in text], scorer, ScoringCounts()))
    started = time.perf_counter()
    counts = ScoringCounts()
    scored = [row for row, _ in score_rows(((json.loads(line), "") for line in text), scorer, counts)]
    seconds = time.perf_counter() - started
    scores = [
        {"question": q, "candidate": c, "step_scores": candidate["step_scores"]}
        for q, row in enumerate(scored)
        for c, candidate in enumerate(row["candidates"])
    ]
    pathlib.Path(options.scores).write_text(json.dumps(scores))
    print(json.dumps({"candidates_per_s": counts.solutions / seconds, "seconds": seconds}))


def first_rows(source: str, questions: int, candidates: int, target: pathlib.Path) -> None:
    """The first candidates of the first questions, with their steps."""
    from cfprm_jax.data.formats.files import expand, rows

    with target.open("w") as file:
        for row in itertools.islice((row.data for path in expand(source) for row in rows(path)), questions):
            row["candidates"] = row["candidates"][:candidates]
            for candidate in row["candidates"]:
                candidate.setdefault("steps", [piece for piece in candidate["text"].split("\n\n") if piece.strip()])
            file.write(json.dumps(row) + "\n")


def largest_difference(first: pathlib.Path, second: pathlib.Path) -> tuple[float, int]:
    """Over all steps, and how many there are."""
    pairs = zip(json.loads(first.read_text()), json.loads(second.read_text()), strict=True)
    worst, steps = 0.0, 0
    for one, other in pairs:
        assert (one["question"], one["candidate"]) == (other["question"], other["candidate"])
        for a, b in zip(one["step_scores"], other["step_scores"], strict=True):
            worst, steps = max(worst, abs(a - b)), steps + 1
    return worst, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer")
    parser.add_argument("--model", required=True)
    parser.add_argument("--candidates", required=True)
    parser.add_argument("--questions", type=positive, default=6)
    parser.add_argument("--per_question", type=positive, default=32)
    parser.add_argument("--packings", default="tree", help="of ours, comma-separated")
    parser.add_argument("--batch_rows", type=positive, default=8)
    parser.add_argument("--max_length", type=positive, default=2048)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=2)
    parser.add_argument("--small", action="store_true", help="one question, 4 candidates, one round")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--scores", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scores:
        ours(options)
        return
    if not options.peer:
        parser.error("--peer is missing: the script to compare with")
    if options.small:
        options.questions, options.per_question, options.rounds = 1, 4, 1

    packings = options.packings.split(",")
    if wrong := set(packings) - set(PACKINGS):
        parser.error(
            f"--packings={options.packings}: {', '.join(sorted(wrong))}; expected some of {', '.join(PACKINGS)}"
        )
    runs: dict[str, list[dict]] = {name: [] for name in (*packings, "peer")}
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder)
        chosen = directory / "candidates.jsonl"
        first_rows(options.candidates, options.questions, options.per_question, chosen)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(options.threads), "XLA_FLAGS": ""}
        environment |= {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        ours_command = [sys.executable, __file__, f"--model={options.model}", f"--candidates={chosen}"]
        ours_command += [f"--batch_rows={options.batch_rows}", f"--max_length={options.max_length}"]
        scores = {name: directory / f"{name}.json" for name in runs}
        commands = {name: [*ours_command, f"--packings={name}", f"--scores={scores[name]}"] for name in packings}
        commands["peer"] = [
            *(sys.executable, options.peer, options.model, str(chosen), f"--questions={options.questions}"),
            *(f"--per_question={options.per_question}", f"--output={scores['peer']}"),
        ]
        for number in range(options.rounds):
            for side, command in commands.items():
                extra = ["--compile"] if side != "peer" and not number else []
                found = last_json([*command, *extra], environment, options.threads)
                runs[side].append(found)
                print(f"{side:8} {json.dumps(found)}", flush=True)
        differences = {name: largest_difference(scores[name], scores["peer"]) for name in packings}
    speeds = {side: [run["candidates_per_s"] for run in those] for side, those in runs.items()}
    medians = {side: statistics.median(those) for side, those in speeds.items()}
    ratios = {name: medians[name] / medians["peer"] for name in packings}
    print("\n| side | candidates/s, median | lowest | highest | times the peer | largest difference of scores |")
    print("|---|---|---|---|---|---|")
    for side, those in speeds.items():
        worst = f"{differences[side][0]:.1e} of {differences[side][1]:,}" if side != "peer" else ""
        times = f"{ratios[side]:.2f}" if side != "peer" else "1"
        print(f"| {side} | {medians[side]:.3f} | {min(those):.3f} | {max(those):.3f} | {times} | {worst} |")
    write_json(
        options.output,
        "torch",
        "transformers",
        runs=runs,
        median_candidates_per_s=medians,
        ratios=ratios,
        largest_differences={name: {"scores": steps, "largest": worst} for name, (worst, steps) in differences.items()},
    )


if __name__ == "__main__":
    run_main(main)
