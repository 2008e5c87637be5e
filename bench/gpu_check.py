"""python bench/gpu_check.py --output=gpu.json: what one accelerator computes, how fast, and in how much memory.

* parity_BACKEND: scores and gradients of a small network against float32 on the CPU, and that no token sees another's
  branch; attention backends that the platform lacks are reported as such.
* 7B and other shapes: tokens/s, MFU and peak memory of training and scoring with random weights.
* determinism: the same three steps twice in a process and once more in another, with and without --deterministic.
* attention: seconds and errors of every backend for one layer of the 7B.

Each is a separate process with a time limit, in order of importance, so that one that fails, hangs or runs out of
memory does not affect the others. Ends within eight minutes and reports what was cut or left out. Exits with 1 if
scores, gradients, isolation or determinism are wrong, or were not measured.

Reads no data. Needs JAX for the accelerator, Flax, absl-py, jaxtyping and NumPy, and nothing else of the project's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

NEEDED = {"jax": "jax", "flax": "flax", "absl": "absl-py", "jaxtyping": "jaxtyping", "numpy": "numpy"}
_MISSING = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
if __name__ == "__main__" and _MISSING:
    print(f"error: gpu_check.py needs {', '.join(_MISSING)}: pip install {' '.join(_MISSING)}", file=sys.stderr)
    sys.exit(2)
if importlib.util.find_spec("cfprm_jax") is None:  # a clone that is not installed
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gpu_options import CheckConfig

from cfprm_jax import flags
from cfprm_jax.config import ATTENTIONS
from cfprm_jax.runtime import config_files

GIB = 1 << 30
# What auto takes on a GPU first.
BACKENDS = ("cudnn", *(name for name in ATTENTIONS if name not in ("auto", "cudnn")))
# Seconds after which a part is cut; a shape's are the longest, for its compiling.
LIMITS = {"parity": 75.0, "shape": 120.0, "determinism": 45.0, "attention": 60.0}
# A part that would have less is left out.
_LEAST = 10.0
# Why a part may have no result, or not all of it.
REASONS = ("failed", "cut", "left_out")


class Clock:
    """The seconds that are left for everything, and for a part."""

    def __init__(self, config: CheckConfig) -> None:
        self._config, self._started = config, time.monotonic()

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def limit(self, kind: str) -> float | None:
        """Seconds for a part of that kind; None if it is left out."""
        left = self._config.budget - self.elapsed()
        return min(self._config.part_limit or LIMITS[kind], left) if left >= _LEAST else None


def main(config: CheckConfig) -> int:
    """All parts, one after another; or the one that is named."""
    if config.part:
        import gpu_parts

        gpu_parts.run(config, lambda result: print(json.dumps(result), flush=True))
        return 0
    figures: dict[str, Any] = {
        "command": sys.argv,
        "python": platform.python_version(),
        "config": config_files.as_dict(config),
        "parts": {},
    }
    parts = order(config.shapes)
    print(f"parts       {', '.join(parts)}; at most {config.budget:.0f} s for all", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the part that runs ends too
    clock = Clock(config)
    with tempfile.TemporaryDirectory() as scratch:
        config = dataclasses.replace(config, scratch=scratch)
        for part, kind in parts.items():
            if kind == "determinism":
                result = determinism(config, clock)
            else:
                result = run_part(config, part, clock.limit(kind))
            figures["parts"][part] = result
            print("\n".join(describe(part, result)), flush=True)
            figures["seconds"] = clock.elapsed()
            figures["verdict"] = verdict(parts, figures["parts"])
            if config.output:  # after each part, so that what is there survives the next
                pathlib.Path(config.output).write_text(json.dumps(figures, indent=2) + "\n")
    print(f"verdict     {'; '.join(figures['verdict']) or 'all as it should be'} ({clock.elapsed():.0f} s)")
    return 1 if figures["verdict"] else 0


def order(shapes: tuple[str, ...]) -> dict[str, str]:
    """Part -> kind, what matters most first: is auto right, does the 7B run, and do the rest hold."""
    first, *others = shapes
    parity = {f"parity_{backend}": "parity" for backend in BACKENDS}
    parts = {f"parity_{BACKENDS[0]}": "parity", first: "shape", "determinism": "determinism", **parity}
    return {**parts, "attention": "attention", **dict.fromkeys(others, "shape")}


def run_part(config: CheckConfig, part: str, limit: float | None, **changes: Any) -> dict[str, Any]:
    """The result of a separate process within the limit, or how it failed; results reported before that are kept."""
    if limit is None:
        return {"left_out": f"{config.budget:.0f} s were over"}
    own = dataclasses.replace(config, part=part, output="", **changes)
    # A group of its own, so that what it starts (XLA's assembler) ends with it.
    process = subprocess.Popen(
        [sys.executable, __file__, *config_files.as_flags(own)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    cut = False
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        cut = True
        _kill(process)
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # it hangs in the driver, where no signal reaches it
            out, err = "", ""
    except BaseException:  # this process is to end
        _kill(process)
        raise
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    result = json.loads(lines[-1]) if lines else {}
    if cut:
        return {**result, "cut": f"after {limit:.0f} s", "log": err[-4000:]}
    if process.returncode:
        return {**result, "failed": (err.strip().splitlines() or ["no word"])[-1], "log": err[-4000:]}
    return result


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def determinism(config: CheckConfig, clock: Clock) -> dict[str, Any]:
    """Whether steps repeat to the bit: within a process, and in another one that compiles them anew."""
    out: dict[str, Any] = {}
    for name, deterministic in (("with", True), ("without", False)):
        runs = []
        for _ in range(2):
            runs.append(run_part(config, "determinism", clock.limit("determinism"), deterministic=deterministic))
            if trouble(runs[-1]):
                return {**out, **{reason: runs[-1][reason] for reason in REASONS if reason in runs[-1]}}
        one, other = runs
        out[name] = {
            "same_process": one["digests"][0] == one["digests"][1],
            "other_process": one["digests"][0] == other["digests"][0],
            "seconds": min(run["seconds"] for run in runs),
        }
        out |= {key: one[key] for key in ("attention", "device", "platform", "jax")}
    return out


def trouble(result: dict[str, Any]) -> str:
    """Why a part has no result, or not all of it; empty if it has."""
    for reason in REASONS:
        if reason in result:
            return f"{reason.replace('_', ' ')}: {result[reason]}"
    return ""


def verdict(parts: dict[str, str], results: dict[str, dict[str, Any]]) -> list[str]:
    """The failures; of parts that only measure, those whose results are not finite."""
    found = []
    for part, result in results.items():
        kind, wrong = parts[part], trouble(result)
        if kind == "parity":
            rows = result.get("rows", [])
            found += [f"{part} {row['dtype']} is off" for row in rows if not row["passed"]]
            found += [f"{part} {wrong}"] if wrong else []
        elif kind == "determinism":
            equal = result.get("with", {})
            if wrong or not (equal["same_process"] and equal["other_process"]):
                found.append(f"determinism {wrong or 'steps differ'}")
        elif kind == "attention":
            found += [f"attention {row['attention']} is off" for row in result.get("rows", []) if not row["passed"]]
        elif result.get("loss_is_finite") is False:
            found.append(f"{part}: the loss is not finite")
    if not any(result.get("rows") for part, result in results.items() if parts[part] == "parity"):
        found.append("no attention backend was compared with the CPU")
    return found


def describe(part: str, result: dict[str, Any]) -> list[str]:
    """A part's lines of the report."""
    head = f"{part:<17}"
    lines = [f"{head}not here: {result['refused']}"] if "refused" in result else []
    for row in result.get("rows", ()):
        seconds = f", {1e3 * row['seconds']:.2f} ms both ways" if "seconds" in row else ""
        lines.append(
            f"{head}{row.get('dtype', row['attention']):<10}{'passed' if row['passed'] else 'FAILED'}: "
            f"{row['what']} off by {row['error']:.1e} of the largest, gradients cosine {row['cosine']:.6f} "
            f"(least {row['least_cosine']:.6f}), norm {row['norm_ratio']:.4f}{seconds}"
            + (", LEAKS" if row.get("leaks") else "")
        )
    for what in ("score", "train"):
        if what in result:
            row = result[what]
            mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
            memory = f"{row['peak_bytes'] / GIB:.1f} GiB" if row["peak_bytes"] else "-"
            lines.append(
                f"{head}{what:<6}{row['seconds']:8.3f} s a step  {row['tokens_per_second']:10,.0f} tokens/s  MFU {mfu} "
                f" peak {memory}  first step {row['first_step_s']:.0f} s  ({result['attention']}, {result['device']})"
            )
    for name in ("with", "without"):
        if name in result:
            row = result[name]
            same, other = ("equal" if row[key] else "differ" for key in ("same_process", "other_process"))
            lines.append(
                f"{head}{name} --deterministic: bits {same} in one process, {other} in another; "
                f"{row['seconds']:.4f} s a step ({result['attention']}, {result['device']})"
            )
    return lines + ([f"{head}{trouble(result)}"] if trouble(result) else [])


if __name__ == "__main__":
    sys.exit(flags.run(CheckConfig, main))
