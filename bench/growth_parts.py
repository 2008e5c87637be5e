"""What bench/growth.py measures with: a small network in training, and parts that run in processes of their own."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import last_json, peak_memory, write_corpus
from networks import fresh

from cfprm_jax.config import (
    DeviceConfig,
    EncodingConfig,
    GranularityConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    ReadConfig,
)
from cfprm_jax.data.packing import PackedBatch, tokens_placed
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.sharding import rules
from cfprm_jax.training import program
from cfprm_jax.training.flops import train_flops, visible_pairs

# Older than this, a file's hash is kept, so that the second opening of a corpus is one with a warm cache.
_SETTLED_SECONDS = 10


class Network:
    """A PRM of one layer, whose loop XLA's own figures count once, in training on one device."""

    VOCAB = 512

    def __init__(self, attention: str) -> None:
        backbone = BackboneConfig(self.VOCAB, 128, 512, 1, 2, 1, 64)
        mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
        backend = rules.attention_backend(attention, mesh, backbone, "float32")
        self.config = PRMConfig(backbone, dtype="float32", attention=backend, remat="none")
        self.built, self.state = fresh(self.config, LossConfig(), OptimizerConfig(), mesh)

    def point(self, batch: PackedBatch) -> Point:
        return Point(self, batch)


class Point:
    """A train step on one batch.

    Attributes:
      costs: unit -> how much the step is, by the model's arithmetic and by XLA's figures.
      text: the compiled program.
    """

    def __init__(self, network: Network, batch: PackedBatch) -> None:
        self._network = network
        self._batch = rules.put_batch(batch, network.built.batch_shardings)
        self._step = compile_step(network.built, batch)
        found, tokens = self._step.cost_analysis(), tokens_placed(batch)
        self.costs = {
            "tokens computed": float(tokens),
            "FLOPs needed": train_flops(network.config, tokens, visible_pairs(batch, tokens)),
            "XLA FLOPs": found["flops"],
            "XLA bytes": found["bytes accessed"],
        }
        self.text: str = self._step.as_text()

    def run(self) -> dict[str, jax.Array]:
        """Do it; the network's state moves on."""
        self._network.state, metrics = self._step(self._network.state, self._batch)
        return jax.block_until_ready(metrics)


def compile_step(built: program.Program, batch: PackedBatch) -> Any:
    """The compiled step for batches of these shapes; nothing is computed."""
    shardings = jax.tree.broadcast(built.batch_shardings, batch)
    shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, shardings)
    step: Any = built.train_step
    return step.lower(built.abstract_state(), shapes).compile()


def devices_part(arguments: Sequence[str]) -> int:
    """accelerator, numbers of devices: bytes of collectives, by layout of the weights and kind."""
    from cfprm_jax.planning import ahead, hlo
    from cfprm_jax.planning.accelerators import ACCELERATORS

    name, *given = arguments
    numbers = [int(number) for number in given]
    if name == "host":
        jax.config.update("jax_num_cpu_devices", max(numbers))
    host = name == "host"
    found: dict[str, dict[int, float]] = {}
    for layout, axes in (("whole weights", "data=-1,fsdp=1"), ("split weights", "data=1,fsdp=-1")):
        for number in numbers:
            mesh = (
                rules.make_mesh(DeviceConfig(mesh=axes), jax.devices("cpu")[:number])
                if host
                else ahead.open_mesh(ACCELERATORS[name], number, axes)
            )
            moved: dict[int, Any] = {}
            for batch, rows in ((f"{max(numbers)} rows", max(numbers)), ("a row a device", number)):
                if rows not in moved:
                    text = _step_text(mesh, rows, "float32" if host else "bfloat16")
                    moved[rows] = hlo.Program(text).collectives()
                for kind, what in moved[rows].items():
                    curve = f"{layout}, {batch}, {kind}|bytes a device and step"
                    found.setdefault(curve, {})[number] = what.bytes
    print(json.dumps([[names, list(points), list(points.values())] for names, points in found.items()]))
    return 0


def _step_text(mesh: Any, rows: int, dtype: str) -> str:
    """The compiled step of a small network, of a width that 64 divides, on rows of 256 tokens."""
    backbone = BackboneConfig(2048, 256, 1024, 4, 4, 2, 64)
    attention = rules.attention_backend("auto", mesh, backbone, dtype)
    built = program.build(PRMConfig(backbone, "linear", dtype, attention), LossConfig(), OptimizerConfig(), 1000, mesh)
    whole, small = jax.ShapeDtypeStruct((rows, 256), jnp.int32), jax.ShapeDtypeStruct((64, 16), jnp.int32)
    labels = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return compile_step(built, PackedBatch(whole, whole, whole, small, labels)).as_text()  # type: ignore[arg-type]


def granularities_part(arguments: Sequence[str]) -> int:
    """directory, trajectories, c_max: building the corpus at granularities c_max .. 1, and its batches."""
    from cfprm_jax.data.loader import Loader

    directory, trajectories, c_max = pathlib.Path(arguments[0]), int(arguments[1]), int(arguments[2])
    data = _settled_corpus(directory, trajectories, 16)
    granularities = GranularityConfig(c_max=c_max)
    open_it = _opener(data, directory, granularities)
    started = time.perf_counter()
    corpus = open_it()
    built = time.perf_counter() - started
    loader = Loader(corpus, granularities, PackingConfig(), EncodingConfig(), seed=0)
    chosen = range(0, loader.num_steps, max(1, loader.num_steps // 64))
    seconds = [_seconds(lambda k=k: loader.batch(k)) for k in chosen]
    tokens = sum(counts["tokens_expanded"] for counts in corpus.report["granularities"].values())
    print(
        json.dumps(
            {
                "tokenising|seconds": built,
                "on disk|bytes": _size(directory / "cache"),
                "expanded, all granularities|tokens": tokens,
                "of the run|steps": loader.num_steps,
                "loader.batch|seconds": statistics.median(seconds),
            }
        )
    )
    return 0


def corpus_part(arguments: Sequence[str]) -> int:
    """directory, trajectories: building the corpus, and in a process of its own opening and reading it."""
    directory, trajectories = pathlib.Path(arguments[0]), int(arguments[1])
    data = _settled_corpus(directory, trajectories, 8)
    started = time.perf_counter()
    _opener(data, directory, GranularityConfig())()
    built = time.perf_counter() - started
    opened = last_json([sys.executable, sys.argv[0], "--part=opened", f"--arguments={directory}"])
    print(json.dumps({"tokenising|seconds": built, "on disk|bytes": _size(directory / "cache"), **opened}))
    return 0


def opened_part(arguments: Sequence[str]) -> int:
    """directory: what every later start of a run finds."""
    from cfprm_jax.data.loader import Loader

    directory = pathlib.Path(arguments[0])
    open_it = _opener(directory / "rows.jsonl", directory, GranularityConfig())
    before = peak_memory()
    opening = statistics.median(_seconds(open_it) for _ in range(5))
    corpus = open_it()
    marks = [time.perf_counter()]
    loader = Loader(corpus, GranularityConfig(), PackingConfig(), EncodingConfig(), seed=0)
    marks.append(time.perf_counter())
    loader.batch(0)  # orders the pass
    marks.append(time.perf_counter())
    chosen = range(1, loader.num_steps, max(1, loader.num_steps // 64))
    seconds = statistics.median(_seconds(lambda k=k: loader.batch(k)) for k in chosen)

    def resume() -> None:
        iterator = loader.iterator()
        state = iterator.get_state()
        assert state == {"next_index": 0}, state
        iterator.set_state({"next_index": loader.num_steps // 2})
        next(iterator)
        iterator.close()

    resumed = _seconds(resume)
    names = ("planning the run", "first batch")
    figures = {"opening, warm cache|seconds": opening}
    figures |= {f"{name}|seconds": b - a for name, a, b in zip(names, marks, marks[1:], strict=False)}
    figures |= {"any other batch|seconds": seconds, "resuming in the middle|seconds": resumed}
    print(json.dumps({**figures, "memory beside the imports|bytes": peak_memory() - before}))
    return 0


def _settled_corpus(directory: pathlib.Path, trajectories: int, a_record: int) -> pathlib.Path:
    directory.mkdir(parents=True)
    data = directory / "rows.jsonl"
    write_corpus(data, trajectories, a_record)
    past = time.time() - _SETTLED_SECONDS
    os.utime(data, (past, past))
    return data


def _opener(data: pathlib.Path, directory: pathlib.Path, granularities: GranularityConfig) -> Callable[[], Any]:
    """Opens or builds the corpus; the tokenizer is made here, and not within what is timed."""
    from cfprm_jax.data.corpus import open_corpus
    from cfprm_jax.synthetic.tokenizer import make_tokenizer

    tokenizer, cache = make_tokenizer(), str(directory / "cache")
    return lambda: open_corpus([str(data)], ReadConfig(), granularities, EncodingConfig(), tokenizer, cache)


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _size(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


PARTS: dict[str, Callable[[Sequence[str]], int]] = {
    "granularities": granularities_part,
    "devices": devices_part,
    "corpus": corpus_part,
    "opened": opened_part,
}
