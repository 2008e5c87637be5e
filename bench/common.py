"""Shared parts of the benches: errors, the description of the machine, alternating runs, reference measures, JSON.

Importing it loads neither JAX nor this package: some benches time that, or run processes that must not hold it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class ProgramError(RuntimeError):
    """A program that a bench started has failed; the message has its own."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a bench and end the process, with an error as the commands print it: one line, and no traceback.

    The status is 2 for an error of the user (an option, a file, a directory of a model), 1 for a program that the bench
    started and that failed, and 130 for Ctrl-C. Any other exception keeps its traceback.
    """
    try:
        sys.exit(main())
    except ProgramError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:  # transformers raises it for directories that are none
        where = "" if error.filename is None else f"{error.filename}: "
        text = " ".join(str(error).split()) if error.strerror is None else error.strerror
        print(f"error: {where}{text}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        errors = sys.modules.get("cfprm_jax.errors")  # a peer's environment has none
        if errors is None or not isinstance(error, errors.UserError):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"interrupted: {shlex.join(sys.argv)}", file=sys.stderr)
        sys.exit(130)


def positive(text: str) -> int:
    """The type of an argument that counts something: a whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def select_devices(platform: str = "cpu") -> list[Any]:
    """The devices of a platform, chosen and set up as the commands do it."""
    from cfprm_jax.runtime import devices

    found = devices.select(platform)
    devices.keep_freed_memory(found)
    return found


def machine(devices: Sequence[Any] = ()) -> dict[str, Any]:
    """The machine, and its load."""
    about: dict[str, Any] = {"cpus": os.cpu_count(), "processor": _processor(), "system": platform.platform()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        about["memory_gb"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    if hasattr(os, "getloadavg"):
        about["load"] = os.getloadavg()
    if devices:
        from cfprm_jax.runtime.devices import describe

        about["devices"] = describe(devices)
    return about


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_json(output: str | pathlib.Path | None, *packages: str, devices: Sequence[Any] = (), **figures: Any) -> None:
    """The figures with date, command, machine and versions; nothing where output is empty or None.

    Args:
      packages: further packages whose versions are recorded, besides JAX and NumPy.
    """
    if not output:
        return
    names = ("jax", "numpy", *packages)
    written = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "machine": machine(devices),
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}},
        **figures,
    }
    pathlib.Path(output).write_text(json.dumps(written, indent=1) + "\n")


def take_turns(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """The results of each side in each round. The sides alternate, so that a change of load affects all of them."""
    given: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            given[name].append(side())
    return given


def seconds_of(function: Callable[[], Any]) -> float:
    """Seconds of a call, until the arrays that it returns are there."""
    import jax

    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


def median_seconds(function: Callable[[], Any], times: int = 5) -> float:
    """Median seconds of `times` calls after a first one, which compiles."""
    seconds_of(function)
    return statistics.median(seconds_of(function) for _ in range(times))


def matrix_product_flops(dtype: str = "float32", size: int = 2048) -> float:
    """FLOP/s of a plain matrix product here, in full precision: what a program of products can hope for."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST))
    return 2 * size**3 / median_seconds(lambda: product(x, x), 9)


def copy_bytes_per_second(megabytes: int = 256) -> float:
    """Bytes read and written a second by the plainest pass over an array that no cache holds."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(megabytes << 18, jnp.float32)
    negate = jax.jit(lambda a: -a)
    return 2 * x.nbytes / median_seconds(lambda: negate(x), 9)


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # getrusage's peak includes that of the parent process
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def last_json(command: Sequence[str], environment: Mapping[str, str] | None = None, threads: int = 0) -> Any:
    """The last line that a program prints; its own error where it fails.

    Args:
      threads: cores that it is tied to, where the system can do that; 0 leaves it all of them.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads] if threads and hasattr(os, "sched_getaffinity") else []
    run = subprocess.run(
        list(command),
        env=None if environment is None else dict(environment),
        capture_output=True,
        text=True,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )
    if run.returncode:
        raise ProgramError(f"{' '.join(command)}: {run.stderr[-4000:].strip()}")
    return json.loads(run.stdout.splitlines()[-1])


def write_corpus(path: pathlib.Path, trajectories: int, a_record: int = 8) -> None:
    """Write a stepwise corpus: records of `a_record` solutions, which branch off one path at different steps."""
    with path.open("w") as file:
        for record in range(-(-trajectories // a_record)):
            steps = [
                f"Step {i + 1}: adding {(record * 7 + i * 3) % 997} to {i * 13 % 89} gives the next value of the sum."
                for i in range(a_record)
            ]
            for end in range(min(a_record, trajectories - record * a_record)):
                last = f"So the sum is {(record * 31 + end) % 9973}, which ends it."
                row = {
                    "prompt": f"Problem {record}: what is the sum that these steps compute?",
                    "completions": [*steps[:end], last],
                    "labels": [1.0] * end + [float(end == a_record - 1)],
                }
                file.write(json.dumps(row) + "\n")
