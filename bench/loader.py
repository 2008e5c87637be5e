"""python bench/loader.py --tokenizer=DIRECTORY: how soon a prepared corpus is there, and how fast batches come.

Writes a stepwise corpus of --trajectories, has it tokenised once, and then measures in a process of its own, as every
later start of a run finds it: the imports, the tokenizer, opening the corpus, planning the run (whose row shapes are
fitted to a sample of its batches), the first batch, and --batches more from the prefetching iterator. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

from common import last_json, peak_memory, positive, run_main, write_corpus, write_json


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part of a start, from the cache if the corpus is in there."""
    clock = time.perf_counter
    marks = [clock()]
    from cfprm_jax.config import EncodingConfig, GranularityConfig, PackingConfig, ReadConfig
    from cfprm_jax.data.corpus import open_corpus
    from cfprm_jax.data.encoding import load_tokenizer
    from cfprm_jax.data.loader import Loader

    marks.append(clock())
    tokenizer = load_tokenizer(options.tokenizer)
    marks.append(clock())
    granularities, encoding = GranularityConfig(c_max=options.c_max), EncodingConfig()
    corpus = open_corpus(options.data, ReadConfig(), granularities, encoding, tokenizer, cache_dir=options.cache_dir)
    marks.append(clock())
    packing = PackingConfig(packing=options.packing, batch_size=options.batch_size, record_chunk=0)
    loader = Loader(corpus, granularities, packing, encoding, seed=0)
    marks.append(clock())
    loader.batch(0)
    marks.append(clock())
    names = ("imports", "tokenizer", "open_corpus", "loader", "first_batch")
    seconds = {name: round(b - a, 3) for name, a, b in zip(names, marks, marks[1:], strict=False)}
    expanded = computed = 0
    iterator = loader.iterator()
    start = clock()
    for _, batch in zip(range(options.batches), iterator, strict=False):
        expanded += batch.tokens_expanded
        computed += batch.tokens_computed
    elapsed = clock() - start
    iterator.close()
    return {
        "trajectories": corpus.num_trajectories(1),
        "steps_of_the_run": loader.num_steps,
        "seconds": seconds,
        "start_up": round(marks[-1] - marks[2], 3),
        "tokens_per_second": round(expanded / elapsed),
        "tokens_computed_per_second": round(computed / elapsed),
        "peak_memory_mb": round(peak_memory() / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--trajectories", type=positive, default=1_000_000)
    parser.add_argument("--data", nargs="*", help="corpora to take instead of the synthetic one")
    parser.add_argument("--c_max", type=positive, default=1)
    parser.add_argument("--packing", default="tree")
    parser.add_argument("--batch_size", type=positive, default=32)
    parser.add_argument("--batches", type=positive, default=500)
    parser.add_argument("--output", help="JSON file for the figures")
    parser.add_argument("--cache_dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache_dir:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data
        if not data:
            data = [str(pathlib.Path(scratch) / "rows.jsonl")]
            write_corpus(pathlib.Path(data[0]), options.trajectories)
        command = [sys.executable, __file__, *sys.argv[1:], f"--cache_dir={scratch}/cache", "--data", *data]
        built, opened = (last_json(command) for _ in range(2))
    building = {"seconds": built["seconds"]["open_corpus"], "peak_memory_mb": built["peak_memory_mb"]}
    print(json.dumps({"building": building, **opened}, indent=1))
    write_json(options.output, "grain", "transformers", building=building, **opened)


if __name__ == "__main__":
    run_main(main)
