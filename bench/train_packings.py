"""python bench/train_packings.py --tokenizer=DIRECTORY --data=FILES: what packing is worth in a whole train step.

One model and the same batches (the first of --packing=tree), which every packing lays out in rows of its own. In each
round the packings take turns over all the batches, in one process, after every shape has been compiled; timed are steps
on batches that are packed already, from the host's arrays to the updated parameters. Prints a table of the medians over
the rounds with the slowest and fastest round, and JSON with --output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
import transformers
from common import select_devices, take_turns, write_json
from networks import build, random_state, small_backbone

from cfprm_jax import flags
from cfprm_jax.config import (
    PACKINGS,
    DeviceConfig,
    EncodingConfig,
    GranularityConfig,
    LossConfig,
    ModelConfig,
    PackingConfig,
    ReadConfig,
)
from cfprm_jax.data.batching import BatchPlan
from cfprm_jax.data.corpus import Corpus, open_corpus
from cfprm_jax.data.encoding import Encoded, load_tokenizer
from cfprm_jax.data.packing import PackedBatch, forest_of, pack, tokens_placed
from cfprm_jax.data.row_shapes import fit_shapes
from cfprm_jax.options import Options, option
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import config_files
from cfprm_jax.sharding import rules
from cfprm_jax.training import program, step


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Measure train steps under each packing."""

    tokenizer: str = option("", "Directory of the tokenizer.")
    data: tuple[str, ...] = option((), "Corpora: files of JSON lines, comma-separated.", kind="list")
    records: int = option(0, "Lines of each file that are taken; 0 takes all.", lower=0)
    layers: int = option(4, "Layers of the model.", lower=1)
    width: int = option(256, "Its hidden size; heads are 64 wide, the MLP four times this.", lower=64)
    packings: tuple[str, ...] = option(PACKINGS, "Packings measured.", choices=PACKINGS)
    batches: int = option(2, "Batches of the run that are taken.", lower=1)
    rounds: int = option(3, "Turns that each packing has over them.", lower=1)
    batch_size: int = option(32, "Trajectories a step.", lower=1)
    tree_row_length: int = option(0, "--row_length of trees; 0 fits some to the data.", lower=0)
    seed: int = option(0, "Seed of the weights and of the order.", lower=0)
    output: str = option("", "JSON file for the figures; empty writes none.")
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)


def read_batches(
    config: BenchConfig, tokenizer: transformers.PreTrainedTokenizerBase
) -> tuple[list[list[Encoded]], int, int]:
    """The first batches of a run, most steps and longest solution of the corpus."""
    stages = GranularityConfig()
    with tempfile.TemporaryDirectory() as scratch:
        files = []
        for number, name in enumerate(config.data):
            file = pathlib.Path(scratch) / f"{number}-{pathlib.Path(name).name}"
            with pathlib.Path(name).open() as lines:
                file.write_text("".join(itertools.islice(lines, config.records or None)))
            files.append(str(file))
        corpus: Corpus = open_corpus(
            files, ReadConfig(), stages, config.encoding, tokenizer, cache_dir=f"{scratch}/cache"
        )
        plan = BatchPlan(corpus, stages, "tree", config.batch_size, seed=config.seed, record_chunk=0)
        # Whole batches: the last of a pass holds what remains.
        steps = range(min(config.batches, plan.num_steps - 1))
        return [[corpus[g][i] for g, i in plan.batch(k)[1]] for k in steps], corpus.max_steps, corpus.max_tokens


def lay_out(
    batches: list[list[Encoded]], packing: str, config: BenchConfig, steps: int, longest: int
) -> list[PackedBatch]:
    """The batches in rows of the shapes that training would fit to them."""
    options = PackingConfig(
        packing=packing, batch_size=config.batch_size, row_length=config.tree_row_length if packing == "tree" else 0
    )
    forests = [forest_of(batch, packing) for batch in batches]
    shapes = fit_shapes(forests, options, longest, config.batch_size)
    return [pack(batch, packing, shapes, config.batch_size, steps) for batch in batches]


def make_step(config: BenchConfig, vocab_size: int) -> tuple[program.Program, step.TrainState]:
    """The train step as the train command builds it, and its first state."""
    mesh = rules.make_mesh(DeviceConfig(), select_devices("auto")[:1])
    options = TrainConfig(model=ModelConfig(dtype="float32", remat="none"), loss=config.loss, encoding=config.encoding)
    built = build(options, small_backbone(vocab_size, config.width, config.layers), mesh)
    return built, random_state(built, config.seed)


def main(config: BenchConfig) -> int:
    """Compile, take turns, report."""
    tokenizer = load_tokenizer(config.tokenizer, config.encoding.marker)
    batches, steps, longest = read_batches(config, tokenizer)
    laid_out = {packing: lay_out(batches, packing, config, steps, longest) for packing in config.packings}
    built, state = make_step(config, len(tokenizer))

    started = time.perf_counter()
    for packed in {b.tokens.shape: b for packing in config.packings for b in laid_out[packing]}.values():
        state, metrics = built.train_step(state, rules.put_batch(packed, built.batch_shardings))
        jax.block_until_ready(metrics)
    compiled = time.perf_counter() - started

    def turn(packing: str) -> tuple[float, float]:
        """Seconds a step, and the last loss."""
        nonlocal state
        start = time.perf_counter()
        for packed in laid_out[packing]:
            state, metrics = built.train_step(state, rules.put_batch(packed, built.batch_shardings))
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / len(batches), round(float(metrics["loss"]), 5)

    turns = take_turns({packing: functools.partial(turn, packing) for packing in config.packings}, config.rounds)
    seconds = {packing: [one[0] for one in done] for packing, done in turns.items()}
    loss_of = {packing: [one[1] for one in done] for packing, done in turns.items()}

    print(
        f"{'packing':>9} {'s/step':>8} {'low':>8} {'high':>8} {'steps/s':>8} {'traj/s':>8} {'speed-up':>8} "
        f"{'computed':>9} {'in rows':>9}  shapes"
    )
    table = []
    slowest = max(statistics.median(times) for times in seconds.values())
    for packing, times in seconds.items():
        median = statistics.median(times)
        rows = laid_out[packing]
        shapes = sorted({f"{b.tokens.shape[0]}x{b.tokens.shape[1]}" for b in rows})
        table.append(
            {
                "packing": packing,
                "seconds": [round(t, 4) for t in times],
                "median_seconds": round(median, 4),
                "steps_per_second": round(1 / median, 4),
                "trajectories_per_second": round(config.batch_size / median, 2),
                "speed_up": round(slowest / median, 2),
                "tokens_computed_a_step": round(np.mean([tokens_placed(b) for b in rows])),
                "tokens_in_rows_a_step": round(np.mean([b.tokens.size for b in rows])),
                "shapes": shapes,
                "losses": loss_of[packing],
            }
        )
        row = table[-1]
        print(
            f"{packing:>9} {median:>8.3f} {min(times):>8.3f} {max(times):>8.3f} {row['steps_per_second']:>8.3f} "
            f"{row['trajectories_per_second']:>8.1f} {row['speed_up']:>8.2f} {row['tokens_computed_a_step']:>9} "
            f"{row['tokens_in_rows_a_step']:>9}  {' '.join(shapes)}"
        )
    write_json(
        config.output,
        devices=jax.devices(),
        config=config_files.as_dict(config),
        batches=len(batches),
        compile_seconds=round(compiled, 1),
        rows=table,
    )
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BenchConfig, main))
