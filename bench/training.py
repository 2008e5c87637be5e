"""python bench/training.py --inputs=DIRECTORIES --output=FILE: trajectories a second in training, and where time goes.

Each directory of --inputs holds train.jsonl, stepwise JSON lines, and model/, a Qwen2 token classifier of Hugging Face
with two classes and a tokenizer. With --peer_python and --peer_script the same is trained by a peer, called as
`SCRIPT DIRECTORY --batch_size=B --steps=S`, which prints a last line of JSON with "trajectories_per_s"; torch_loop.py
is one. The sides alternate, --rounds times each; float32 unless --dtype and --peer_flags set another type, no
rematerialization on either side, all cores or one device. Time here is that of whole optimizer steps: taking a batch
from the corpus, packing it, the step, the update; compilation is left out.

Prints a table a model and batch size: medians over the rounds with the slowest and fastest, and how many times faster
than the peer (the median of the rounds' ratios); tokens/s of whole trajectories, however few of them are computed; and
on a device whose peak is known the MFU, of what each side computes. Then the parts of a step under --packing=tree,
beside what the same run measures for a plain matrix product. With a peer, the loss of the first rows is computed on
both sides from the peer's own token ids (bench/trl_first_step.py, or --first_step), and printed. --small is a quick
look.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import last_json, matrix_product_flops, median_seconds, select_devices, take_turns, write_json

from cfprm_jax import flags, losses
from cfprm_jax.config import (
    PACKINGS,
    DeviceConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackingConfig,
    RunConfig,
)
from cfprm_jax.data.encoding import Encoded
from cfprm_jax.data.packing import PackedBatch, pack
from cfprm_jax.data.row_shapes import RowShapes
from cfprm_jax.models import prm
from cfprm_jax.models.attention import attention
from cfprm_jax.options import Options, option
from cfprm_jax.run import inputs
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup, setup
from cfprm_jax.runtime import caches, config_files
from cfprm_jax.sharding import rules
from cfprm_jax.training import program, step
from cfprm_jax.training.flops import peak_flops, train_flops, visible_pairs


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Measure training beside a peer."""

    inputs: tuple[str, ...] = option((), "Directories with train.jsonl and model/, comma-separated.", kind="list")
    peer_python: str = option("", "Python of the peer's environment; empty measures without a peer.")
    peer_script: str = option("", "The peer's script.")
    peer_flags: tuple[str, ...] = option((), "Further flags of the peer, such as --dtype=bfloat16.", kind="list")
    first_step: str = option(
        "", "Script, called as `SCRIPT DIRECTORY --first_rows=N`, of the peer's first loss; empty is trl_first_step.py."
    )
    platform: str = option("cpu", "Device.", choices=("auto", "cpu", "gpu", "tpu"))
    dtype: str = option("float32", "Type of our activations and products.", choices=("float32", "bfloat16"))
    tokens_a_part: int = option(
        12288, "Tokens of a step that are held at once, but under tree; 4 GB are enough at 4 layers of 512.", lower=1
    )
    batch_sizes: tuple[str, ...] = option(("32", "256"), "Trajectories a step.", kind="list")
    packings: tuple[str, ...] = option(("tree", "sequence"), "Packings measured.", choices=PACKINGS)
    rounds: int = option(3, "Turns of every side; 0 compares the losses of the first rows alone.", lower=0)
    tree_trajectories: int = option(1024, "Trajectories of a turn under --packing=tree.", lower=1)
    other_trajectories: int = option(128, "Trajectories of a turn under the other packings.", lower=1)
    peer_trajectories: int = option(64, "Trajectories of the peer's turn, besides its first step, a warm-up.", lower=1)
    first_rows: int = option(32, "Rows whose loss is compared with the peer's.", lower=1)
    small: bool = option(False, "One round of the first batch size with few trajectories.")
    seed: int = option(0, "Seed of the order.", lower=0)
    output: str = option("", "JSON file for the figures; empty writes none.")


# Kept over the sides, so that a program is compiled once.
_build = functools.lru_cache(maxsize=32)(program.build)


@dataclasses.dataclass
class Model:
    """A network in training; every timed step updates its state.

    Attributes:
      config: options that all sides share.
      state: of the run, on the mesh.
    """

    name: str
    config: TrainConfig
    mesh: jax.sharding.Mesh
    state: step.TrainState

    @classmethod
    def open(cls, directory: pathlib.Path, cache: str, dtype: str) -> Model:
        config = TrainConfig(
            train_data=(str(directory / "train.jsonl"),),
            model=ModelConfig(model=str(directory / "model"), dtype=dtype, remat="none"),
            loss=LossConfig(loss="bce"),
            eval=EvalConfig(eval_fraction=0.0),
            run=RunConfig(data_cache_dir=cache),
        )
        mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
        model = cls(directory.name, config, mesh, None)  # type: ignore[arg-type]
        model.state, _ = model.setup(config.packing).create_state()
        return model

    def setup(self, packing: PackingConfig, accumulation: int = 1, seed: int = 0) -> Setup:
        """The run of train with this packing."""
        config = dataclasses.replace(
            self.config,
            packing=packing,
            optimizer=OptimizerConfig(accumulation=accumulation),
            run=dataclasses.replace(self.config.run, seed=seed),
        )
        sources = inputs.materialise(config, pathlib.Path(config.run.data_cache_dir))
        return setup(config, self.mesh, sources, build=_build)


class Ours:
    """Some steps of a run under one packing, spread evenly over it."""

    def __init__(self, model: Model, config: BenchConfig, packing: str, batch_size: int) -> None:
        self.model, self.packing, self.batch_size = model, packing, batch_size
        trajectories = config.tree_trajectories if packing == "tree" else config.other_trajectories
        options = PackingConfig(packing=packing, batch_size=batch_size, record_chunk=0)
        made = model.setup(options, seed=config.seed)
        (counts,) = made.data.report["granularities"].values()
        mean = counts["tokens_expanded"] / counts["trajectories"]
        parts = 1 if packing == "tree" else max(1, round(batch_size * mean / config.tokens_a_part))
        self.accumulation = parts
        self.setup = made if parts == 1 else model.setup(options, parts, config.seed)
        self.loader, self.network = self.setup.data.loader, self.setup.network.config
        # The last batch of a pass holds what remains.
        whole = self.loader.num_steps - 1
        count = min(whole, -(-trajectories // batch_size))
        self.steps = [index * whole // count for index in range(count)]
        self.compile()

    def compile(self) -> None:
        """Run every shape once."""
        batches = [self.loader.batch(k) for k in self.steps]
        self.computed = round(np.mean([batch.tokens_computed for batch in batches]))
        self.expanded = round(np.mean([batch.tokens_expanded for batch in batches]))
        self.slots = round(np.mean([batch.packed.tokens.size for batch in batches]))
        work = [
            train_flops(self.network, one.tokens_computed, visible_pairs(one.packed, one.tokens_computed))
            for one in batches
        ]
        self.flops = float(np.mean(work))
        shapes = {batch.packed.tokens.shape: batch.packed for batch in batches}
        self.shapes = sorted(f"{rows}x{length}" for rows, length in shapes)
        # Three of one: glibc has then taken the memory that a step needs.
        for packed in [*shapes.values(), *list(shapes.values())[-1:] * 2]:
            self.run(packed)
        jax.block_until_ready(self.model.state)

    def run(self, packed: PackedBatch) -> dict[str, jax.Array]:
        built = self.setup.program
        placed = rules.put_batch(packed, built.batch_shardings)
        self.model.state, metrics = built.train_step(self.model.state, placed)
        return metrics

    def turn(self) -> dict[str, float]:
        """Trajectories a second of wall and of processor time."""
        started, used = time.perf_counter(), processor_seconds()
        for k in self.steps:
            metrics = self.run(self.loader.batch(k).packed)
        jax.block_until_ready((self.model.state, metrics))
        number = len(self.steps) * self.batch_size
        return {
            "trajectories_per_s": number / (time.perf_counter() - started),
            "per_processor_second": number / (processor_seconds() - used),
        }


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peer_turn(config: BenchConfig, directory: pathlib.Path, batch_size: int) -> dict[str, Any]:
    """The peer's last line."""
    steps = -(-config.peer_trajectories // batch_size)
    command = [
        config.peer_python, config.peer_script, str(directory), f"--batch_size={batch_size}", f"--steps={steps}",
        *config.peer_flags,
    ]  # fmt: skip
    return dict(last_json(command))


def first_step_losses(config: BenchConfig, model: Model, directory: pathlib.Path) -> dict[str, float]:
    """The loss of the first rows on both sides, from the peer's token ids and the weights in the directory."""
    script = config.first_step or str(pathlib.Path(__file__).with_name("trl_first_step.py"))
    theirs = last_json([config.peer_python, script, str(directory), f"--first_rows={config.first_rows}"])
    encoded = []
    for ids, labels in zip(theirs["input_ids"], theirs["labels"], strict=True):
        places = np.flatnonzero(np.array(labels) >= 0)
        encoded.append(
            Encoded(np.array(ids, np.int32), places.astype(np.int32), np.array(labels, np.float32)[places], 0)
        )
    built = model.setup(PackingConfig()).program
    most = max(len(one.step_positions) for one in encoded)
    found = {"peer": theirs["loss"]}
    for packing in PACKINGS:
        length = -(-max(len(one.tokens) for one in encoded) // 128) * 128
        shapes = RowShapes.covering((length,), len(encoded))
        packed = pack(encoded, packing, shapes, len(encoded), most)
        placed = rules.put_batch(packed, built.batch_shardings)
        _, total, count = built.eval_step(model.state.params, placed)
        found[packing] = float(total) / float(count)
    return found


def parts(side: Ours) -> dict[str, Any]:
    """The parts of a step's time, on one batch of the middle size."""
    model, built, net = side.model, side.setup.program, side.network
    batches = sorted((side.loader.batch(k) for k in side.steps), key=lambda batch: batch.packed.tokens.size)
    chosen = batches[len(batches) // 2]
    placed = rules.put_batch(chosen.packed, built.batch_shardings)
    loss = losses.loss_function(model.config.loss)
    forward = functools.partial(prm.apply, net, constrain=rules.constrain_activations(model.mesh))

    def objective(params: Any, batch: PackedBatch) -> jax.Array:
        total, count = loss(step.step_logits(forward, params, batch), jnp.asarray(batch.labels))
        return total / count

    rows, length = placed.tokens.shape
    backbone = net.backbone
    heads = (backbone.num_attention_heads, backbone.num_key_value_heads)
    q, k = (
        jax.random.normal(jax.random.key(0), (rows, length, number, backbone.head_dim), net.dtype) for number in heads
    )

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(q, k, v, placed.subtree_end, net.attention).astype(jnp.float32)))

    evaluate, gradient = jax.jit(objective), jax.jit(jax.value_and_grad(objective))
    attend = jax.jit(jax.grad(mixed, argnums=(0, 1, 2)))
    step_index = side.steps[len(side.steps) // 2]
    seconds = {
        "pack a batch (host)": median_seconds(lambda: side.loader.batch(step_index)),
        "forward": median_seconds(lambda: evaluate(model.state.params, placed)),
        "forward and backward": median_seconds(lambda: gradient(model.state.params, placed)),
        "attention, both ways, all layers": backbone.num_hidden_layers * median_seconds(lambda: attend(q, k, k)),
        "whole step": median_seconds(lambda: side.run(chosen.packed)),
    }
    tokens = chosen.tokens_computed
    needed = train_flops(net, tokens, visible_pairs(chosen.packed, tokens))
    peak = matrix_product_flops(net.dtype)
    return {
        "shape": f"{rows}x{length}",
        "seconds": {name: round(value, 5) for name, value in seconds.items()},
        "needed_gflop": round(needed / 1e9, 2),
        "gflop_per_s": round(needed / seconds["whole step"] / 1e9, 1),
        "matrix_product_gflop_per_s": round(peak / 1e9, 1),
        "share_of_matrix_product": round(needed / seconds["whole step"] / peak, 3),
    }


def measure(config: BenchConfig, model: Model, directory: pathlib.Path, batch_size: int) -> dict[str, Any]:
    """All sides in turn at one batch size."""
    sides = {packing: Ours(model, config, packing, batch_size) for packing in config.packings}
    calls = {"peer": functools.partial(peer_turn, config, directory, batch_size)} if config.peer_python else {}
    turns = take_turns(calls | {packing: side.turn for packing, side in sides.items()}, config.rounds)
    rows = []
    peak = peak_flops(jax.devices()[0].device_kind)
    print(f"\n{model.name}, {batch_size} trajectories a step")
    print(
        f"{'side':>9} {'traj/s':>9} {'low':>9} {'high':>9} {'times':>7} {'tokens/s':>9} {'MFU':>6} "
        f"{'tokens':>8} {'slots':>8}  shapes"
    )
    for name, done in turns.items():
        rates = [turn["trajectories_per_s"] for turn in done]
        row: dict[str, Any] = {"side": name, "turns": done, "trajectories_per_s": statistics.median(rates)}
        times = ""
        if config.peer_python and name != "peer":
            ratios = [ours / peer["trajectories_per_s"] for ours, peer in zip(rates, turns["peer"], strict=True)]
            row |= {"times_the_peer": statistics.median(ratios), "ratios": ratios}
            times = f"{row['times_the_peer']:.2f}"
        # A side that shares nothing computes what sequence does.
        counted = sides.get("sequence" if name == "peer" else name)
        tokens_per_s = mfu = None
        if counted is not None:
            per_trajectory = row["trajectories_per_s"] / batch_size
            tokens_per_s = per_trajectory * counted.expanded
            mfu = per_trajectory * counted.flops / peak if peak else None
        row |= {"tokens_per_s": tokens_per_s, "mfu": mfu}
        line = f"{name:>9} {row['trajectories_per_s']:>9.2f} {min(rates):>9.2f} {max(rates):>9.2f} {times:>7} "
        line += f"{tokens_per_s:>9.0f} " if tokens_per_s is not None else f"{'':>9} "
        line += f"{mfu:>6.1%}" if mfu is not None else f"{'':>6}"
        if name in sides:
            side = sides[name]
            row |= {"tokens_computed": side.computed, "tokens_expanded": side.expanded, "slots": side.slots}
            row |= {"shapes": side.shapes, "accumulation": side.accumulation}
            line += f" {side.computed:>8} {side.slots:>8}  {' '.join(side.shapes[:6])}"
        print(line, flush=True)
        rows.append(row)
    result: dict[str, Any] = {"model": model.name, "batch_size": batch_size, "sides": rows}
    if "tree" in sides:
        result["parts"] = parts(sides["tree"])
        print(f"parts of a step, {result['parts']['shape']}:")
        for name, seconds in result["parts"]["seconds"].items():
            print(f"  {name:<34} {1e3 * seconds:>9.1f} ms")
        print(
            f"  {result['parts']['gflop_per_s']} GFLOP/s needed by the model, "
            f"{result['parts']['share_of_matrix_product']:.0%} of a plain matrix product"
        )
    return result


def main(config: BenchConfig) -> int:
    """Every model, every batch size."""
    if config.small:
        config = dataclasses.replace(
            config, rounds=1, batch_sizes=config.batch_sizes[:1], tree_trajectories=256, other_trajectories=32
        )
    if config.peer_python:  # its process needs the device's memory beside ours
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    found = select_devices(config.platform)
    caches.use_compile_cache("auto")
    results: Sequence[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in config.inputs:
            directory = pathlib.Path(name)
            model = Model.open(directory, cache, config.dtype)
            if config.peer_python:
                first = first_step_losses(config, model, directory)
                print(
                    f"{directory.name}: first loss " + ", ".join(f"{side} {loss:.6f}" for side, loss in first.items())
                )
                results = [*results, {"model": directory.name, "first_losses": first}]
            for size in config.batch_sizes if config.rounds else ():
                results = [*results, measure(config, model, directory, int(size))]
            del model
            _build.cache_clear()
            gc.collect()
    write_json(config.output, devices=found, config=config_files.as_dict(config), results=results)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BenchConfig, main))
