"""Load and export a checkpoint of a real model's shape: peak memory and seconds, against a plain read of its files.

    python bench/large_checkpoint.py --config=CONFIG_JSON [--layers=N] [--rounds=3] [--cache=cold] [--scratch=DIRECTORY]

CONFIG_JSON is the config.json of a model, of which nothing else is needed: its tensors are written with random values
in bfloat16, in several shards, a tensor at a time. Then, alternated and each in a process of its own: a plain read of
the files through one 8 MiB buffer; a plain read of whole files into memory that is kept, which a load cannot do
without where parameters are host memory; a load on one device, and on 8 host devices with fsdp=8. And once each: an
export, compared tensor by tensor with what was loaded, and a plain write of as many bytes. Peak memory is the
process's largest resident set, interpreter and libraries included; the limit beside it is the parameters, the largest
tensor and 1 GB. cold drops the files from the page cache before every run, warm reads them once before.

--layers cuts the depth, which is the small mode. Needs twice the checkpoint's size on disk. Linux only. Prints a table
and writes large_checkpoint.json into the working directory (--output).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

from common import last_json, peak_memory, positive, run_main, select_devices, write_json

BUFFER = 8 << 20
DEVICES = {"one device": 1, "fsdp=8": 8}


def weights(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(directory.glob("*.safetensors"))


def write(directory: pathlib.Path, config: pathlib.Path, layers: int, shard_bytes: int) -> dict[str, Any]:
    """A random checkpoint of a causal language model, in bfloat16; what is in it."""
    import ml_dtypes
    import numpy as np

    from cfprm_jax.huggingface.safetensors_files import PlannedTensor, write_shards
    from cfprm_jax.models.config import BackboneConfig, PRMConfig
    from cfprm_jax.models.parameters import param_specs, walk

    raw = json.loads(config.read_text())
    raw["num_hidden_layers"] = layers or raw["num_hidden_layers"]
    net = BackboneConfig.from_hf(raw)
    generator = np.random.default_rng(0)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        """Any sign and mantissa, magnitudes from 1/128 to 1/64."""
        bits = generator.integers(0, 1 << 16, shape, np.uint16)
        return ((bits & 0x807F) | 0x3C00).view(ml_dtypes.bfloat16)

    shapes = {
        name: spec.shape[1:] if spec.stacked else spec.shape
        for path, spec in walk(param_specs(PRMConfig(net)))
        if path.startswith("backbone.")
        for name in spec.hf_names()
    }
    largest = max(map(math.prod, shapes.values()))
    parameters = sum(map(math.prod, shapes.values()))
    if not net.tie_word_embeddings:
        shapes["lm_head.weight"] = (net.vocab_size, net.hidden_size)
    planned = [PlannedTensor(name, shape, lambda shape=shape: [values(shape)]) for name, shape in shapes.items()]
    directory.mkdir()
    write_shards(directory, planned, "BF16", shard_bytes)
    (directory / "config.json").write_text(json.dumps(raw))
    return {"layers": net.num_hidden_layers, "parameter_bytes": 2 * parameters, "largest_tensor_bytes": 2 * largest}


def open_model(directory: pathlib.Path, devices: int) -> tuple[Any, Any, float]:
    """(configuration, parameters, seconds)."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    from cfprm_jax.config import DeviceConfig
    from cfprm_jax.huggingface import loading
    from cfprm_jax.models.config import PRMConfig
    from cfprm_jax.models.parameters import param_specs
    from cfprm_jax.sharding import rules

    backbone, _ = loading.read_config(directory)
    config = PRMConfig(backbone, dtype="bfloat16")
    mesh = rules.make_mesh(DeviceConfig(mesh="data=1,fsdp=-1,tensor=1"), select_devices())
    shardings = rules.param_shardings(mesh, param_specs(config))
    key = jax.random.key(0)
    started = time.monotonic()
    params, _ = loading.load_params(directory, config, shardings=shardings, dtype=jnp.bfloat16, head_key=key)
    jax.block_until_ready(params)
    return config, params, time.monotonic() - started


def part_read(options: argparse.Namespace) -> dict[str, Any]:
    buffer, size = bytearray(BUFFER), 0
    started = time.monotonic()
    for path in weights(options.source):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size += count
    return {"seconds": time.monotonic() - started, "bytes": size, "peak": peak_memory()}


def part_keep(options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    kept = [path.read_bytes() for path in weights(options.source)]
    return {"seconds": time.monotonic() - started, "bytes": sum(map(len, kept)), "peak": peak_memory()}


def part_write(options: argparse.Namespace) -> dict[str, Any]:
    buffer = os.urandom(BUFFER)
    started = time.monotonic()
    size = sum(path.stat().st_size for path in weights(options.source))
    with (options.target).open("wb", buffering=0) as file:
        for begin in range(0, size, BUFFER):
            file.write(buffer[: min(BUFFER, size - begin)])
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    options.target.unlink()
    return {"seconds": seconds, "bytes": size, "peak": peak_memory()}


def part_load(options: argparse.Namespace) -> dict[str, Any]:
    from cfprm_jax.huggingface.safetensors_files import DTYPES, list_directory

    *_, seconds = open_model(options.source, options.devices)
    stored = sum(
        math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in list_directory(options.source).tensors
        if tensor.name != "lm_head.weight"
    )
    return {"seconds": seconds, "bytes": stored, "peak": peak_memory()}


def part_export(options: argparse.Namespace) -> dict[str, Any]:
    from cfprm_jax.config import EncodingConfig
    from cfprm_jax.huggingface.export import export
    from cfprm_jax.huggingface.safetensors_files import list_directory
    from cfprm_jax.synthetic.tokenizer import make_tokenizer

    config, params, _ = open_model(options.source, options.devices)
    started = time.monotonic()
    report = export(options.target, params, config, make_tokenizer(), EncodingConfig())
    seconds, peak = time.monotonic() - started, peak_memory()
    del params
    before, after = ({t.name: t for t in list_directory(d).tensors} for d in (options.source, options.target))
    same = all(
        (a == b).all()
        for name in before.keys() - {"lm_head.weight"}
        for (_, a), (_, b) in zip(
            before[name].chunks(0, before[name].shape[0]), after[name].chunks(0, after[name].shape[0]), strict=True
        )
    )
    files = len(report.files)
    shutil.rmtree(options.target)
    return {"seconds": seconds, "bytes": report.stored_bytes, "peak": peak, "files": files, "bit_equal": same}


PARTS = {"read": part_read, "keep": part_keep, "write": part_write, "load": part_load, "export": part_export}


def prepare_cache(directory: pathlib.Path, cache: str) -> None:
    """The files in the page cache or, as far as the system heeds the advice, not in it."""
    for path in weights(directory):
        with path.open("rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                buffer = bytearray(BUFFER)
                while file.readinto(buffer):
                    pass


def run(part: str, source: pathlib.Path, target: pathlib.Path, devices: int, cache: str) -> dict[str, Any]:
    prepare_cache(source, cache)
    command = [sys.executable, __file__, f"--part={part}", f"--source={source}", f"--target={target}"]
    return last_json([*command, f"--devices={devices}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, help="config.json of the shape")
    parser.add_argument("--layers", type=int, default=0, help="0 keeps the number that config.json gives")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold")
    parser.add_argument("--shard_gb", type=float, default=4.0, help="size of the shards written")
    parser.add_argument("--scratch", type=pathlib.Path, help="existing directory to write the checkpoint into")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("large_checkpoint.json"))
    for name, kind in (("part", str), ("source", pathlib.Path), ("target", pathlib.Path), ("devices", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return
    if options.config is None:
        parser.error("--config is required")

    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="large_checkpoint_") as scratch:
        source, target = pathlib.Path(scratch) / "source", pathlib.Path(scratch) / "target"
        about = write(source, options.config, options.layers, int(options.shard_gb * 1e9))
        limit = about["parameter_bytes"] + about["largest_tensor_bytes"] + 10**9
        plain_reads = [("plain read", "read", 1), ("plain read, kept", "keep", 1)]
        tasks = [*plain_reads, *((f"load, {name}", "load", n) for name, n in DEVICES.items())]
        once = [("plain write", "write", 1), *((f"export, {name}", "export", n) for name, n in DEVICES.items())]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in (*tasks, *once)}
        for turn in range(options.rounds):
            for name, part, devices in tasks if turn % 2 == 0 else tasks[::-1]:
                runs[name].append(run(part, source, target, devices, options.cache))
        for name, part, devices in once:
            runs[name].append(run(part, source, target, devices, options.cache))
        shards = len(weights(source))

    plain, kept = (
        statistics.median(r["bytes"] / r["seconds"] for r in runs[name]) for name in ("plain read", "plain read, kept")
    )
    print(f"{options.config.name}, {about['layers']} layers, {about['parameter_bytes'] / 1e9:.2f} GB of parameters in")
    print(f"bfloat16, {shards} shard(s), {options.cache} cache; peak memory may be {limit / 1e9:.2f} GB")
    print("| what | seconds, median (range) | GB/s | of a plain read | of one that is kept | peak memory, GB |")
    print("|---|---|---|---|---|---|")
    table = {}
    for name, results in runs.items():
        seconds, rates = [r["seconds"] for r in results], [r["bytes"] / r["seconds"] for r in results]
        peak, rate = max(r["peak"] for r in results), statistics.median(rates)
        table[name] = {
            "seconds": seconds,
            "bytes_per_second": rate,
            "share_of_plain_read": rate / plain,
            "share_of_plain_read_kept": rate / kept,
            "peak": peak,
        }
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"| {name} | {spread} | {rate / 1e9:.2f} | {rate / plain:.2f} | {rate / kept:.2f} | {peak / 1e9:.2f} |")
    exports = [runs[name][0] for name, part, _ in once if part == "export"]
    print(f"exports equal to what was loaded, bit by bit: {all(r['bit_equal'] for r in exports)}")
    write_json(
        options.output,
        "safetensors",
        shape=about,
        peak_limit=limit,
        results=table,
        bit_equal=all(r["bit_equal"] for r in exports),
    )


if __name__ == "__main__":
    run_main(main)
