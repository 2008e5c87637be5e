"""python bench/growth.py --output=FILE.json --plot=FILE.png: what a run costs as each thing in it grows.

Cost is measured against trajectories in a batch, steps a trajectory, tokens a row, granularities, devices and the
corpus, each alone, on data made here and a network of one small layer. For each curve it prints the figures and the law
that they follow: the exponent p of the power x^p that fits them best in logarithms, how far they are from it (residual,
the root mean square of relative distances), and the exponent between the last two points, where what is fixed weighs
least. The points of a sweep take turns. Beside the time of a train step stand what the model needs for it
(training.flops) and XLA's own figures of the compiled step. XLA counts the body of a loop once: that is exact for
--attention=xla, and leaves out most of the attention of what auto takes on a CPU, which loops over visible blocks.

A train step of each number of devices is compiled, not run; --accelerator=h100-80gb compiles it for GPUs that need not
be there (with the extra aot), host for CPU devices. On two cores --small takes about a minute, the whole under ten.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from common import last_json, seconds_of, select_devices, take_turns, write_json
from growth_parts import PARTS, Network

from cfprm_jax import flags
from cfprm_jax.config import Options, PackingConfig, option
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch, forest_of, pack
from cfprm_jax.data.row_shapes import RowShapes, fit_shapes
from cfprm_jax.planning.accelerators import ACCELERATORS
from cfprm_jax.runtime import config_files

SWEEPS = ("trajectories", "steps", "length", "granularities", "devices", "corpus")
# Of the made solutions: tokens of a question, tokens of a step, and solutions of a record.
_QUESTION, _STEP, _A_RECORD = 48, 16, 32


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Measure how costs grow."""

    sweeps: tuple[str, ...] = option(SWEEPS, "What is varied.", choices=SWEEPS)
    rounds: int = option(5, "Turns of every point that is timed.", lower=1)
    largest_corpus: int = option(1_000_000, "Trajectories of the largest corpus.", lower=1000)
    accelerator: str = option("host", "Devices compiled for.", choices=("host", *ACCELERATORS))
    small: bool = option(False, "Two points a curve, some curves left out, two rounds.")
    plot: str = option("", "PNG file; empty draws none.")
    output: str = option("", "JSON file; empty writes none.")
    part: str = option("", "For the bench itself: a part that runs in a process of its own.")
    arguments: tuple[str, ...] = option((), "For the bench itself: what the part is given.")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One cost against one thing.

    Attributes:
      sweep, varied: which; name: of the curve; unit: of the cost.
      x, y: the points.
    """

    sweep: str
    varied: str
    name: str
    unit: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def law(self) -> dict[str, float | None]:
        return power_law(self.x, self.y)


def power_law(x: Sequence[float], y: Sequence[float]) -> dict[str, float | None]:
    """The power of x that fits y best: exponent, residual (relative), and the exponent between the last two points.

    None where there is no power: fewer than two different points, or a cost that is zero somewhere.
    """
    if len(set(x)) < 2 or min(y) <= 0:
        return {"exponent": None, "residual": None, "last_exponent": None}
    logs = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    slope, offset = np.polyfit(*logs, 1)
    off = logs[1] - (slope * logs[0] + offset)
    last = (logs[1][-1] - logs[1][-2]) / (logs[0][-1] - logs[0][-2])
    return {
        "exponent": round(float(slope), 3),
        "residual": round(math.expm1(float(np.sqrt(np.mean(off**2)))), 3),
        "last_exponent": round(float(last), 3),
    }


def solutions(count: int, steps: int, step_tokens: int = _STEP, branches: int = _A_RECORD) -> list[Encoded]:
    """Synthetic trajectories: records of `branches`, which leave a path of `steps` steps, evenly spread along it."""
    made = []
    for record in range(-(-count // branches)):
        rng = np.random.default_rng(record)
        path = rng.integers(1, Network.VOCAB, _QUESTION + steps * step_tokens)
        here = min(branches, count - record * branches)
        # The last goes along the path to its end; only that one where there is one alone.
        for own in np.linspace(steps / here, steps, here):
            number = max(1, math.ceil(own))
            begin = _QUESTION + (number - 1) * step_tokens
            tokens = np.concatenate([path[:begin], rng.integers(1, Network.VOCAB, step_tokens)])
            places = _QUESTION + step_tokens * np.arange(1, number + 1) - 1
            labels = (np.arange(number) < number - 1).astype(np.float32)
            made.append(Encoded(tokens.astype(np.int32), places.astype(np.int32), labels, 0))
    return made


def packed(encoded: list[Encoded], packing: str) -> PackedBatch:
    """In rows of the shape that a run would fit to them."""
    longest, steps = max(len(e.tokens) for e in encoded), max(len(e.step_positions) for e in encoded)
    options = PackingConfig(packing=packing, batch_size=len(encoded))
    shapes = fit_shapes([forest_of(encoded, packing)], options, longest, len(encoded))
    return pack(encoded, packing, shapes, len(encoded), steps)


Points = dict[tuple[str, int], tuple[PackedBatch, str]]
"""(name of the curve, x) -> the batch, and the attention that it is timed with."""


def step_points(sweep: str, small: bool) -> tuple[str, Points]:
    """What is varied, and the batches of a sweep over train steps."""
    points: Points = {}
    if sweep == "trajectories":
        for count in (8, 64) if small else (8, 16, 32, 64, 128, 256):
            for packing in ("tree", "sequence"):
                points[packing, count] = packed(solutions(count, 16), packing), "auto"
        return "trajectories in a batch", points
    if sweep == "steps":
        for steps in (8, 107) if small else (4, 8, 16, 32, 64, 107):
            for packing in ("tree",) if small else ("tree", "sequence"):
                points[packing, steps] = packed(solutions(8 if small else 32, steps), packing), "auto"
            if small:
                continue
            same = solutions(8, steps, 107 * _STEP // steps, branches=1)
            points["same tokens", steps] = packed(same, "sequence"), "auto"
        return "steps a trajectory", points
    for length in (512, 2048) if small else (256, 512, 1024, 2048, 4096):
        one = solutions(1, 1, length - _QUESTION)[0]
        batch = pack([one], "sequence", RowShapes(((1, length),)), 1, 1)
        points |= {(attention, length): (batch, attention) for attention in ("auto", "xla")}
    return "tokens of a row", points


def steps_sweep(sweep: str, config: BenchConfig) -> list[Curve]:
    """Seconds, FLOPs and bytes of whole train steps."""
    varied, points = step_points(sweep, config.small)
    networks = {attention: Network(attention) for _, attention in points.values()}
    sides: dict[str, Callable[[], float]] = {}
    costs: dict[tuple[str, int], dict[str, float]] = {}
    for (name, x), (batch, attention) in points.items():
        point = networks[attention].point(batch)
        point.run()
        sides[f"{name} {x}"] = functools.partial(seconds_of, point.run)
        costs[name, x] = point.costs
    seconds = take_turns(sides, 2 if config.small else config.rounds)
    curves = []
    for name in dict.fromkeys(name for name, _ in points):
        xs = tuple(x for own, x in points if own == name)
        medians = tuple(statistics.median(seconds[f"{name} {x}"]) for x in xs)
        curves.append(Curve(sweep, varied, name, "seconds a step", xs, medians))
        for unit in costs[name, xs[0]]:
            curves.append(Curve(sweep, varied, name, unit, xs, tuple(costs[name, x][unit] for x in xs)))
    return curves


def parts_sweep(sweep: str, config: BenchConfig) -> list[Curve]:
    """Costs that processes of their own find, a point each or all points together."""

    def part(*arguments: Any) -> Any:
        command = [sys.executable, __file__, f"--part={sweep}", f"--arguments={','.join(map(str, arguments))}"]
        return last_json(command)

    if sweep == "devices":
        numbers = (2, 8) if config.small else (2, 4, 8, 16, 32, 64)
        found = part(config.accelerator, *numbers)
        return [Curve(sweep, "devices", *names.split("|"), tuple(x), tuple(y)) for names, x, y in found]
    with tempfile.TemporaryDirectory() as scratch:
        if sweep == "granularities":
            xs = (1, 4) if config.small else (1, 2, 3, 4, 6, 8)
            rows = [part(f"{scratch}/{x}", 400 if config.small else 4000, x) for x in xs]
        else:
            sizes = (300, 3000) if config.small else (1000, 3000, 10_000, 100_000, 1_000_000)
            xs = tuple(size for size in sizes if size <= config.largest_corpus)
            rows = [part(f"{scratch}/{x}", x) for x in xs]
    varied = "granularities" if sweep == "granularities" else "trajectories in the corpus"
    return [
        Curve(sweep, varied, *names.split("|"), xs, tuple(row[names] for row in rows))  # type: ignore[arg-type]
        for names in rows[0]
    ]


def show(curve: Curve) -> str:
    law = curve.law()
    values = "  ".join(f"{x:g}: {y:.4g}" for x, y in zip(curve.x, curve.y, strict=True))
    fit = "no power of it"
    if law["exponent"] is not None:
        fit = f"^{law['exponent']:.2f} (off by {law['residual']:.0%}, at the end ^{law['last_exponent']:.2f})"
    return f"  {curve.name + ', ' + curve.unit:<52} {fit:<36} {values}"


def draw(curves: Sequence[Curve], path: str) -> None:
    """A panel a sweep; costs of several units share it, each divided by its value at the first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(curve.sweep for curve in curves))
    columns = min(3, len(sweeps))
    figure, axes = pyplot.subplots(
        -(-len(sweeps) // columns), columns, figsize=(6 * columns, 4.8 * -(-len(sweeps) // columns)), squeeze=False
    )
    for panel, sweep in zip(axes.flat, sweeps, strict=False):
        own = [curve for curve in curves if curve.sweep == sweep and min(curve.y) > 0]
        if sweep in ("trajectories", "steps", "length"):
            own = [curve for curve in own if curve.unit == "seconds a step"]
        one_unit = len({curve.unit for curve in own}) == 1
        for curve in own:
            y = np.asarray(curve.y) / (1 if one_unit else curve.y[0])
            label = f"{curve.name if one_unit else curve.name + ', ' + curve.unit}: ^{curve.law()['exponent']:.2f}"
            panel.loglog(curve.x, y, "o-", label=label, markersize=4)
        panel.set_xlabel(own[0].varied)
        panel.set_xticks(own[0].x, [f"{x:g}" for x in own[0].x])
        panel.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        panel.set_ylabel(own[0].unit if one_unit else "times the first point")
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(sweeps) :]:
        panel.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(config: BenchConfig) -> int:
    """Every sweep."""
    if config.part:
        return PARTS[config.part](config.arguments)
    found = select_devices("cpu")
    curves: list[Curve] = []
    for sweep in config.sweeps:
        run = parts_sweep if sweep in PARTS else steps_sweep
        new = run(sweep, config)
        jax.clear_caches()
        print(f"{new[0].varied}", flush=True)
        for curve in new:
            print(show(curve), flush=True)
        curves += new
    if config.plot:
        draw(curves, config.plot)
    rows = [{**dataclasses.asdict(curve), **curve.law()} for curve in curves]
    write_json(config.output, devices=found, config=config_files.as_dict(config), curves=rows)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BenchConfig, main))
