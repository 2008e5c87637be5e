"""python bench/packing.py --tokenizer=DIRECTORY --data=FILES: what packing saves, and how full the rows are.

One pass over a corpus at each granularity, packing and batch size. The columns: tokens expanded (every trajectory
counted whole), distinct (as prefixes of one record within one step: what prefix sharing cannot go below), computed (in
the rows, without padding), reduction (expanded / computed), over (computed / distinct), fill (computed / area of the
rows), padded (area / distinct), shapes that occur and that the set allows, and what the loader alone delivers.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import tempfile
import time
from typing import Any

from common import write_json

from cfprm_jax import flags
from cfprm_jax.config import PACKINGS, EncodingConfig, GranularityConfig, PackingConfig, ReadConfig, parse_granularity
from cfprm_jax.data.batching import BatchPlan
from cfprm_jax.data.corpus import Corpus, open_corpus
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.data.loader import Loader
from cfprm_jax.data.partition import shared_forest
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files

COLUMNS = {
    "granularity": "C",
    "packing": "packing",
    "batch_size": "batch",
    "expanded": "expanded",
    "distinct": "distinct",
    "computed": "computed",
    "reduction": "reduction",
    "over": "over",
    "fill": "fill",
    "padded": "padded",
    "shapes_used": "shapes",
    "shapes_allowed": "of",
    "mean_length": "length",
    "tokens_per_second": "tokens/s",
}


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
    """Measure packing on a corpus."""

    tokenizer: str = option("", "Directory of the tokenizer.")
    data: tuple[str, ...] = option((), "Corpora: files or globs, comma-separated.", kind="list")
    granularity: tuple[str, ...] = option(("1", "2", "4"), "Granularities measured.")
    packings: tuple[str, ...] = option(PACKINGS, "Packings measured.", choices=PACKINGS)
    batch_sizes: tuple[str, ...] = option(("32", "64", "128", "256"), "Trajectories a step.")
    row_length: int = option(0, "As for training.", lower=0)
    seed: int = option(0, "Seed of the order.", lower=0)
    cache_dir: str = option("", "Where the tokenised corpus is kept; empty is a temporary directory.")
    output: str = option("", "JSON file for the figures; empty writes none.")
    encoding: EncodingConfig = dataclasses.field(default_factory=EncodingConfig)


def distinct_tokens(corpus: Corpus, plan: BatchPlan) -> int:
    """Distinct prefixes of each record within each step, added up."""
    total = 0
    for step in range(plan.num_steps):
        records: dict[str, list[Any]] = collections.defaultdict(list)
        for granularity, place in plan.batch(step)[1]:
            records[corpus.source(granularity, place)].append(corpus[granularity][place].tokens)
        total += sum(shared_forest(sequences).size for sequences in records.values())
    return total


def measure(corpus: Corpus, granularity: str, packing: PackingConfig, config: BenchConfig) -> dict[str, Any]:
    """One pass at one granularity."""
    stage = GranularityConfig(granularities=(granularity,))
    loader = Loader(corpus, stage, packing, config.encoding, seed=config.seed)
    shapes: collections.Counter[tuple[int, int]] = collections.Counter()
    expanded = computed = 0
    start = time.perf_counter()
    for batch in loader.iterator():
        shapes[batch.packed.tokens.shape] += 1
        expanded += batch.tokens_expanded
        computed += batch.tokens_computed
    seconds = time.perf_counter() - start
    area = sum(rows * length * count for (rows, length), count in shapes.items())
    distinct = expanded
    if packing.packing == "tree":
        distinct = distinct_tokens(
            corpus, BatchPlan(corpus, stage, "tree", packing.batch_size, seed=config.seed, record_chunk=0)
        )
    return {
        "granularity": parse_granularity(granularity),
        "packing": packing.packing,
        "batch_size": packing.batch_size,
        "steps": loader.num_steps,
        "expanded": expanded,
        "distinct": distinct,
        "computed": computed,
        "reduction": round(expanded / computed, 2),
        "over": round(computed / distinct, 4),
        "fill": round(computed / area, 4),
        "padded": round(area / distinct, 4),
        "shapes_used": len(shapes),
        "shapes_allowed": len(loader.shapes.all()),
        "mean_length": round(sum(r * n * n * count for (r, n), count in shapes.items()) / area),
        "tokens_per_second": round(expanded / seconds),
        "shapes": {f"{rows}x{length}": count for (rows, length), count in sorted(shapes.items())},
    }


def main(config: BenchConfig) -> int:
    """Print the table row by row, and write the JSON."""
    tokenizer = load_tokenizer(config.tokenizer, config.encoding.marker)
    figures = []
    with tempfile.TemporaryDirectory() as scratch:
        corpus = open_corpus(
            config.data,
            ReadConfig(),
            GranularityConfig(granularities=config.granularity),
            config.encoding,
            tokenizer,
            cache_dir=config.cache_dir or scratch,
        )
        print(" ".join(f"{title:>10}" for title in COLUMNS.values()))
        for granularity in config.granularity:
            for packing in config.packings:
                for size in config.batch_sizes:
                    options = PackingConfig(packing, config.row_length, batch_size=int(size), record_chunk=0)
                    figures.append(measure(corpus, granularity, options, config))
                    print(" ".join(f"{figures[-1][name]:>10}" for name in COLUMNS), flush=True)
    write_json(config.output, "grain", config=config_files.as_dict(config), report=corpus.report, rows=figures)
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(BenchConfig, main))
