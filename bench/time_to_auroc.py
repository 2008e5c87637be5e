"""python bench/time_to_auroc.py --inputs=DIRECTORY --peer_python=PYTHON: seconds until TRL's best AUROC is reached.

DIRECTORY holds train.jsonl and held_out.jsonl, stepwise JSON lines, and model/, a Qwen2 token classifier of Hugging
Face with two classes and a tokenizer. Both sides train it from the same weights on the same trajectories with float32,
AdamW and linear decay: TRL's PRM trainer (bench/trl_auroc.py) in batches of --batch_size trajectories, each weighed by
itself; this package on whole records with each label once, in batches of --batch_tokens. Each side's learning rate is
the best of --learning_rates in a first run of each, which is not counted; a single one is taken without such a run.
Then the sides alternate, --rounds times.

The measure is AUROC over the distinct held-out steps, every --every and --peer_every steps; evaluations are not part of
the time, nor are importing, reading and tokenizing. Compilation is part of it: our time starts before the first step is
compiled, without a compile cache.

Prints the curves, for each round the peer's best AUROC with its time, our time until it is reached, and the ratio.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
from common import last_json, select_devices, write_json

from cfprm_jax import flags
from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    RunConfig,
)
from cfprm_jax.options import Options, option
from cfprm_jax.run import evaluation, inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import setup
from cfprm_jax.sharding import rules

Curve = list[list[float]]


@dataclasses.dataclass(frozen=True)
class TimeConfig(Options):
    """Measure the time until the peer's AUROC is reached."""

    inputs: str = option("", "Directory with train.jsonl, held_out.jsonl and model/.")
    peer_python: str = option("", "Python of the peer's environment, with TRL 1.13.")
    platform: str = option("cpu", "Device.", choices=("auto", "cpu", "gpu", "tpu"))
    learning_rates: tuple[str, ...] = option(("1e-3", "2e-3", "4e-3"), "Peak learning rates tried.", kind="list")
    batch_size: int = option(32, "The peer's trajectories a step.", lower=1)
    batch_tokens: int = option(4000, "Our computed tokens a step.", lower=1)
    steps: int = option(200, "Our steps.", lower=1)
    peer_steps: int = option(700, "The peer's steps.", lower=1)
    every: int = option(10, "Our steps between evaluations.", lower=1)
    peer_every: int = option(50, "The peer's steps between evaluations.", lower=1)
    warmup_fraction: float = option(0.1, "Share of the steps with linear warm-up.", lower=0.0, upper=1.0)
    adam_b2: float = option(0.99, "AdamW's beta 2.", lower=0.0, upper=0.99999)
    max_length: int = option(256, "Most tokens of a trajectory.", lower=8)
    rounds: int = option(3, "Turns of each side.", lower=1)
    output: str = option("", "JSON file for the figures; empty writes none.")


def ours(config: TimeConfig, rate: float, seed: int, scratch: str) -> dict[str, Any]:
    """A run of train: its curve of [steps, seconds, AUROC], and the numbers of held-out steps."""
    jax.clear_caches()
    directory = pathlib.Path(config.inputs)
    options = TrainConfig(
        train_data=(str(directory / "train.jsonl"),),
        model=ModelConfig(model=str(directory / "model"), dtype="float32", remat="none"),
        loss=LossConfig(loss="bce", label_weight="node"),
        encoding=EncodingConfig(max_length=config.max_length, system_prompt=""),
        packing=PackingConfig(
            packing="tree",
            record_chunk=0,
            batch_tokens=config.batch_tokens,
            row_length=config.max_length,
            row_shapes=1,
        ),
        optimizer=OptimizerConfig(
            learning_rate=rate,
            warmup_fraction=config.warmup_fraction,
            decay="linear",
            adam_b2=config.adam_b2,
        ),
        eval=EvalConfig(eval_data=(str(directory / "held_out.jsonl"),), eval_max_trajectories=0),
        run=RunConfig(max_steps=config.steps, seed=seed, data_cache_dir=scratch),
    )
    passes = 1
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    while True:
        options = dataclasses.replace(
            options, granularity=dataclasses.replace(options.granularity, epochs_per_granularity=passes)
        )
        made = setup(options, mesh, inputs.materialise(options, pathlib.Path(scratch)))
        if made.num_steps >= config.steps:
            break
        passes = -(-config.steps * passes // made.num_steps)
    state, _ = made.create_state()
    jax.block_until_ready(state)
    built, curve, paused = made.program, [], 0.0
    with contextlib.closing(made.data.loader.iterator()) as batches:
        started = time.perf_counter()
        for step in range(1, config.steps + 1):
            state, metrics = built.train_step(state, rules.put_batch(next(batches).packed, built.batch_shardings))
            if step % config.every and step != config.steps:
                continue
            jax.block_until_ready((state, metrics))
            now = time.perf_counter()
            found = evaluation.evaluate(built.eval_step, made.data.held_out, built.batch_shardings, state.params)
            assert found is not None
            curve.append([step, now - started - paused, found[f"{evaluation.DISTINCT}auroc"]])
            paused += time.perf_counter() - now
    numbers = {name: round(found[evaluation.DISTINCT + name]) for name in ("positives", "negatives")}
    return {"curve": curve, **numbers}


def peers(config: TimeConfig, rate: float, seed: int) -> dict[str, Any]:
    """The same of TRL's trainer."""
    script = pathlib.Path(__file__).with_name("trl_auroc.py")
    command = [config.peer_python, str(script), config.inputs, f"--learning_rate={rate}", f"--seed={seed}"]
    command += [f"--{name}={getattr(config, name)}" for name in ("batch_size", "adam_b2", "max_length")]
    command += [f"--steps={config.peer_steps}", f"--every={config.peer_every}", f"--warmup={config.warmup_fraction}"]
    return dict(last_json(command))


def best(curve: Curve) -> list[float]:
    """The point of the highest AUROC, the first of them."""
    return max(curve, key=lambda point: point[2])


def reached(curve: Curve, auroc: float) -> float | None:
    """Seconds until the first evaluation with at least this AUROC; None if there is none."""
    return next((seconds for _, seconds, value in curve if value >= auroc), None)


def main(config: TimeConfig) -> int:
    """Choose learning rates, then alternate."""
    devices = select_devices(config.platform)
    rates = [float(text) for text in config.learning_rates]
    with tempfile.TemporaryDirectory() as scratch:
        tried: dict[str, dict[float, dict[str, Any]]] = {"peer": {}, "ours": {}}
        if len(rates) > 1:
            tried["peer"] = {rate: peers(config, rate, 0) for rate in rates}
            tried["ours"] = {rate: ours(config, rate, 0, scratch) for rate in rates}
        chosen = {}
        for side, runs in tried.items():
            for rate, run in runs.items():
                step, seconds, auroc = best(run["curve"])
                print(f"{side}, learning rate {rate:g}: best AUROC {auroc:.4f} after {seconds:.1f} s, step {step:.0f}")
            chosen[side] = max(runs, key=lambda rate: best(runs[rate]["curve"])[2]) if runs else rates[0]
        rounds = []
        for seed in range(1, config.rounds + 1):
            theirs, own = peers(config, chosen["peer"], seed), ours(config, chosen["ours"], seed, scratch)
            counts = [[run[name] for name in ("positives", "negatives")] for run in (theirs, own)]
            if counts[0] != counts[1]:
                raise SystemExit(f"the sides have other held-out steps: {counts} positive and negative")
            _, seconds, auroc = best(theirs["curve"])
            until = reached(own["curve"], auroc)
            ratio = None if until is None else seconds / until
            shown = "not reached" if until is None else f"{until:.1f} s, {ratio:.1f} times sooner"
            print(
                f"round {seed}: the peer's best AUROC {auroc:.4f} after {seconds:.1f} s; ours {shown}; "
                f"our best {best(own['curve'])[2]:.4f}",
                flush=True,
            )
            rounds.append(
                {"peer": theirs, "ours": own, "auroc": auroc, "seconds": seconds, "until": until, "ratio": ratio}
            )
    ratios = [one["ratio"] for one in rounds if one["ratio"] is not None]
    if ratios:
        print(f"ratio: median {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")
    write_json(
        config.output,
        "jax",
        "cfprm_jax",
        devices=devices,
        chosen=chosen,
        tried={side: {f"{rate:g}": run for rate, run in runs.items()} for side, runs in tried.items()},
        rounds=rounds,
    )
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(TimeConfig, main))
