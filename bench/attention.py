"""python bench/attention.py --output=FILE: what attention costs against the length of a row, and which law it follows.

Times the gradients of one layer's attention for rows of three kinds: one sequence, which sees half of the square;
sequences of --size tokens side by side; and trees of --size tokens, half of them one path and the rest branches of 32
tokens along it. The backends take turns. Prints seconds, how many pairs of tokens see each other, and the exponent of
the fitted power of the length; --plot draws the same. --backends that cannot run on --platform are refused by JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import seconds_of, select_devices, take_turns, write_json

from cfprm_jax import flags
from cfprm_jax.models.attention import attention
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files

_BRANCH = 32


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Measure attention against length."""

    lengths: tuple[str, ...] = option(("256", "512", "1024", "2048", "4096"), "Tokens a row.", kind="list")
    backends: tuple[str, ...] = option(("xla", "blockwise"), "Backends of --attention.", kind="list")
    size: int = option(512, "Tokens of a sequence or tree where a row holds several.", lower=2 * _BRANCH)
    heads: int = option(4, "Query heads.", lower=1)
    kv_heads: int = option(2, "Key and value heads.", lower=1)
    head_dim: int = option(64, "Width of a head.", lower=8)
    dtype: str = option("float32", "Type of the inputs.", choices=("float32", "bfloat16"))
    platform: str = option("auto", "Device.", choices=("auto", "cpu", "gpu", "tpu"))
    rounds: int = option(5, "Turns of every backend.", lower=1)
    plot: str = option("", "PNG file; empty draws none.")
    output: str = option("", "JSON file; empty writes none.")


def one_sequence(length: int, size: int) -> np.ndarray:
    del size
    return np.full(length, length)


def sequences(length: int, size: int) -> np.ndarray:
    return np.minimum((np.arange(length) // size + 1) * size, length)


def trees(length: int, size: int) -> np.ndarray:
    ends = []
    for start in range(0, length, size):
        here = min(size, length - start)
        path = max(here // 2, 1)
        # Branches leave the path from its end to its beginning, in depth-first order: those that leave a token
        # or anything below it come before those that leave above it.
        branches = -(-(here - path) // _BRANCH)
        leaves_at = np.linspace(path, 1, branches + 1).astype(int)[1:] if branches else np.zeros(0, int)
        end = np.full(path, path)
        for number, at in enumerate(leaves_at):
            end[:at] = min(path + (number + 1) * _BRANCH, here)
        branch = np.minimum(path + (np.arange(here - path) // _BRANCH + 1) * _BRANCH, here)
        ends.append(start + np.concatenate([end, branch]))
    return np.concatenate(ends)


KINDS: dict[str, Callable[[int, int], np.ndarray]] = {
    "one sequence": one_sequence,
    "sequences": sequences,
    "trees": trees,
}


def visible_pairs(ends: np.ndarray) -> int:
    """Pairs j <= i < ends[j]."""
    return int((ends - np.arange(len(ends))).sum())


def compiled(config: BenchConfig, backend: str, ends: np.ndarray) -> Callable[[], Any]:
    """A call that computes the gradients once, compiled already."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    inputs = [
        jax.random.normal(key, (1, len(ends), number, config.head_dim), config.dtype)
        for key, number in zip(keys, heads, strict=True)
    ]
    row = jnp.asarray(ends[None], jnp.int32)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(q, k, v, row, backend).astype(jnp.float32)))

    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))

    def run() -> Any:
        return gradients(*inputs)

    jax.block_until_ready(run())
    return run


def measure(config: BenchConfig, kind: str) -> list[dict[str, Any]]:
    lengths = [int(length) for length in config.lengths]
    rows = {
        backend: {"kind": kind, "backend": backend, "lengths": lengths, "seconds": []} for backend in config.backends
    }
    for length in lengths:
        ends = KINDS[kind](length, config.size)
        runs = {backend: compiled(config, backend, ends) for backend in config.backends}
        sides = {backend: functools.partial(seconds_of, run) for backend, run in runs.items()}
        seconds = take_turns(sides, config.rounds)
        for backend, row in rows.items():
            row["seconds"].append(seconds[backend])
            row.setdefault("pairs", []).append(visible_pairs(ends))
            jax.clear_caches()
    for row in rows.values():
        row["median_seconds"] = [statistics.median(times) for times in row["seconds"]]
        # The shortest rows are a single block, whose cost is mostly fixed.
        slope, _ = np.polyfit(np.log(lengths[1:]), np.log(row["median_seconds"][1:]), 1)
        row["exponent"] = round(float(slope), 2)
    return list(rows.values())


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained")
    lines = dict(zip(dict.fromkeys(row["backend"] for row in rows), ("--", "-", ":", "-."), strict=False))
    for row in rows:
        label = f"{row['backend']}, {row['kind']}: length^{row['exponent']}"
        milliseconds = [1e3 * seconds for seconds in row["median_seconds"]]
        axes.loglog(row["lengths"], milliseconds, marker="o", linestyle=lines[row["backend"]], label=label)
    lengths = rows[0]["lengths"]
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("tokens of a row")
    axes.set_ylabel("milliseconds of a layer's attention, both ways")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main(config: BenchConfig) -> int:
    """Every kind of row."""
    found = select_devices(config.platform)
    rows = []
    print(f"{'rows of':>13} {'backend':>9} {'exponent':>8}  milliseconds (pairs a token) at each length")
    for kind in KINDS:
        for row in measure(config, kind):
            cells = [
                f"{length}: {1e3 * seconds:.1f} ({pairs / length:.0f})"
                for length, seconds, pairs in zip(row["lengths"], row["median_seconds"], row["pairs"], strict=True)
            ]
            print(f"{kind:>13} {row['backend']:>9} {row['exponent']:>8}  {'  '.join(cells)}", flush=True)
            rows.append(row)
    if config.plot:
        draw(rows, config.plot)
    write_json(config.output, devices=found, config=config_files.as_dict(config), rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BenchConfig, main))
