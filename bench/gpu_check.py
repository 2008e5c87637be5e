"""python bench/gpu_check.py --output=gpu.json: what one accelerator computes, how fast, and in how much memory.

Parity first: scores and gradients of a small network in bfloat16, with every attention backend that the platform has,
against float32 on the CPU; and that no backend lets a token see another's branch. Then tokens/s, MFU and peak memory of
training and scoring, for published shapes with random weights. Each part is a process of its own, so that one that runs
out of memory costs no other, and a peak is that of its part. Meant to end within eight minutes on an H100; parts that
would begin after --budget seconds are left out, and the report says so. Exits with 1 if parity fails.

Reads no data and needs no Grain: JAX for the accelerator, Flax and transformers are enough.
"""

from __future__ import annotations

import os
import sys

# A peak of 60 of 80 GB is all that JAX takes by default.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import dataclasses
import functools
import json
import pathlib
import platform
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax import flags, losses
from cfprm_jax.config import DeviceConfig, LossConfig, OptimizerConfig, option
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import attention, parameters, prm
from cfprm_jax.models.config import PRMConfig, Qwen2Config
from cfprm_jax.planning.shapes import known_backbone
from cfprm_jax.training import devices, flops, program, sharding, step
from cfprm_jax.training.step import TrainState

GIB = 1 << 30
# Against float32 on the CPU, of the largest score and in the direction of all gradients together. bfloat16 has 8 bits.
TOLERANCE = {"bfloat16": (0.05, 0.99), "float32": (1e-3, 0.99999)}
TINY = Qwen2Config(256, 64, 128, 2, 4, 2, 16)


@dataclasses.dataclass(frozen=True)
class CheckConfig:
    """Check and measure one accelerator."""

    platform: str = option("auto", "Accelerator; auto is JAX's own choice.", choices=("auto", "cpu", "gpu", "tpu"))
    shapes: tuple[str, ...] = option(("0.5B", "1.5B", "7B"), "Qwen2.5 sizes that are measured, or tiny.", kind="list")
    rows: int = option(8, "Rows of a batch.", lower=1)
    length: int = option(2048, "Tokens of a row.", lower=64)
    steps: int = option(8, "Steps that are timed, after two that are not.", lower=1)
    optimizer: str = option("adamw_compact", "Optimizer of the training steps.", choices=("adamw", "adamw_compact"))
    budget: float = option(420.0, "Seconds after which no further part begins.", lower=0.0)
    output: str = option("", "JSON file for the figures.")
    part: str = option("", "Run this part alone, in this process: parity, or one of the shapes.")


def make_batch(rows: int, length: int, vocab: int, seed: int = 0) -> PackedBatch:
    """Rows full of small trees: a stem of a quarter, and three branches from its end."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (rows, length)).astype(np.int32)
    positions, ends = np.zeros((2, rows, length), np.int32)
    markers = []
    size = max(64, length // 4)
    for row in range(rows):
        for start in range(0, length, size):
            end = min(start + size, length)
            stem = start + (end - start) // 4
            positions[row, start:stem] = np.arange(stem - start)
            ends[row, start:stem] = end
            for branch in np.array_split(np.arange(stem, end), 3):
                positions[row, branch] = stem - start + np.arange(len(branch))
                ends[row, branch] = branch[-1] + 1
                markers.append([row * length + stem - 1, *(row * length + branch[[len(branch) // 2, -1]])])
    labels = rng.integers(0, 2, (len(markers), 3)).astype(np.float32)
    return PackedBatch(tokens, positions, ends, np.array(markers, np.int32), labels)


def parity(config: CheckConfig) -> dict[str, Any]:
    """Scores and gradients against the CPU's float32, and whether any branch leaks into another."""
    wide = config.shapes != ("tiny",)
    net = Qwen2Config(4096, 896, 2048, 4, 14, 2, 64) if wide else TINY
    batch = make_batch(2, min(config.length, 512), net.vocab_size)
    device, cpu = devices.select(config.platform)[0], jax.devices("cpu")[0]
    loss = losses.loss_function(LossConfig())
    params = jax.device_put(jax.jit(functools.partial(parameters.init_params, PRMConfig(net)))(jax.random.key(0)), cpu)

    def evaluate(network: PRMConfig, where: jax.Device) -> tuple[np.ndarray, np.ndarray]:
        def objective(params: Any, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
            z = step.step_scores(functools.partial(prm.apply, network), params, batch)
            total, count = loss(z, jnp.asarray(batch.labels))
            return total / count, z

        placed = jax.device_put((params, batch), where)
        grads, z = jax.jit(jax.grad(objective, has_aux=True))(*placed)
        flat = np.concatenate([np.ravel(np.asarray(g, np.float64)) for g in jax.tree.leaves(grads)])
        return np.asarray(z, np.float64), flat

    z, grads = evaluate(PRMConfig(net, dtype="float32"), cpu)
    rows = []
    for dtype in ("float32", "bfloat16"):
        for backend in attention.BACKENDS:
            row: dict[str, Any] = {"dtype": dtype, "attention": backend}
            rows.append(row)
            try:
                shape = {
                    "heads": net.num_attention_heads,
                    "kv_heads": net.num_key_value_heads,
                    "head_dim": net.head_dim,
                }
                network = PRMConfig(
                    net, dtype=dtype, attention=attention.resolve(backend, device.platform, dtype, **shape)
                )
            except UserError as error:
                row["refused"] = str(error)
                continue
            found, found_grads = evaluate(network, device)
            row["score_error"] = float(np.abs(found - z).max() / np.abs(z).max())
            norms = np.linalg.norm(grads), np.linalg.norm(found_grads)
            row["gradient_cosine"] = float(grads @ found_grads / (norms[0] * norms[1]))
            row["gradient_norm_ratio"] = float(norms[1] / norms[0])
            row["leaks"] = leaks(network, jax.device_put(params, device), batch, device)
            most, least = TOLERANCE[dtype]
            row["passed"] = row["score_error"] < most and row["gradient_cosine"] > least and not row["leaks"]
    return {"rows": rows, "passed": all(row.get("passed", True) for row in rows), **where_it_ran(device)}


def leaks(network: PRMConfig, params: Any, batch: PackedBatch, device: jax.Device) -> bool:
    """Whether other tokens in the last branch of the first row change a score that does not see it."""
    scores = jax.jit(functools.partial(step.step_scores, functools.partial(prm.apply, network)))
    last = batch.step_positions[batch.step_positions < batch.tokens.shape[1]].max()
    branch = np.flatnonzero((batch.subtree_end[0] == last + 1) & (np.arange(batch.tokens.shape[1]) <= last))
    branch = branch[batch.positions[0, branch] >= batch.positions[0, last] - len(branch) + 1]
    first = branch[-(batch.tokens.shape[1] // 16) :]
    tokens = batch.tokens.copy()
    tokens[0, first] = 1 + (tokens[0, first] + 1) % (network.backbone.vocab_size - 1)
    before, after = (
        np.asarray(scores(params, jax.device_put(b, device))) for b in (batch, batch._replace(tokens=tokens))
    )
    unseen = ~np.isin(batch.step_positions, first)
    return bool((before != after)[unseen].any()) or not bool((before != after)[~unseen].any())


def measure(config: CheckConfig, name: str) -> dict[str, Any]:
    """Training and scoring of one shape: seconds a step, tokens/s, MFU and peak memory of each."""
    backbone = TINY if name == "tiny" else known_backbone(f"Qwen2.5-{name}")
    if backbone is None:
        raise UserError(f"--shapes: {name!r} is no size of Qwen2.5")
    device = devices.select(config.platform)[0]
    mesh = sharding.make_mesh(DeviceConfig(mesh="data=1"), [device])
    backend = sharding.attention_backend("auto", mesh, backbone, "bfloat16")
    network = PRMConfig(backbone, dtype="bfloat16", attention=backend, remat="layer")
    options = OptimizerConfig(optimizer=config.optimizer)
    built = program.build(network, LossConfig(), options, 1000, mesh)
    host = make_batch(config.rows, config.length, backbone.vocab_size)
    batch = sharding.put_batch(host, built.batch_shardings)
    tokens = config.rows * config.length
    arithmetic = flops.train_flops(network, tokens, flops.visible_pairs(host, tokens))
    peak = flops.peak_flops(device.device_kind)
    out: dict[str, Any] = {"attention": backend, "parameters": parameters.count(network), **where_it_ran(device)}

    def fresh(key: jax.Array) -> TrainState:  # in one program: no float32 copy of everything
        params, opt_state = built.tx.init(parameters.init_params(network, key))
        return TrainState(params, opt_state, jnp.zeros((), jnp.int32))

    state = jax.jit(fresh, out_shardings=built.state_shardings)(jax.random.key(0))
    jax.block_until_ready(state)

    def timed(advance: Any, work: float) -> dict[str, Any]:
        started = time.perf_counter()
        jax.block_until_ready(advance())
        compiled = time.perf_counter() - started
        jax.block_until_ready(advance())
        seconds = []
        for _ in range(config.steps):
            started = time.perf_counter()
            jax.block_until_ready(advance())
            seconds.append(time.perf_counter() - started)
        median = float(np.median(seconds))
        used = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "first_step_s": compiled,
            "seconds": median,
            "spread_s": float(max(seconds) - min(seconds)),
            "tokens_per_second": tokens / median,
            "mfu": work / median / peak if peak else None,
            "peak_bytes": used,
        }

    # Scoring first: a peak is of all that ran before, and training needs more.
    out["score"] = timed(lambda: built.eval_step(state.params, batch), arithmetic / 3)

    def train() -> Any:
        nonlocal state
        state, metrics = built.train_step(state, batch)
        return metrics

    out["train"] = timed(train, arithmetic)
    out["loss_is_finite"] = bool(np.isfinite(float(train()["loss"])))
    return out


def where_it_ran(device: jax.Device) -> dict[str, Any]:
    return {"device": device.device_kind, "platform": device.platform}


def main(config: CheckConfig) -> int:
    """All parts, one after another; or the one that is named."""
    if config.part:
        result = parity(config) if config.part == "parity" else measure(config, config.part)
        print(json.dumps(result), flush=True)
        return 0
    started = time.monotonic()
    figures: dict[str, Any] = {
        "command": sys.argv,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "config": flags.as_dict(config),
        "parts": {},
    }
    for part in ("parity", *config.shapes):
        if time.monotonic() - started > config.budget:
            figures["parts"][part] = {"left_out": f"{config.budget:.0f} s were over"}
        else:
            figures["parts"][part] = run_part(config, part)
        print(describe(part, figures["parts"][part]), flush=True)
        figures["seconds"] = time.monotonic() - started
        if config.output:  # after each part, so that what is there survives the next
            pathlib.Path(config.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["parts"]["parity"].get("passed") else 1


def run_part(config: CheckConfig, part: str) -> dict[str, Any]:
    """What a process of its own reports, or how it failed."""
    command = [sys.executable, __file__, *flags.as_flags(dataclasses.replace(config, part=part, output=""))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1], "log": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


def describe(part: str, result: dict[str, Any]) -> str:
    """A part's lines of the report."""
    for reason in ("failed", "left_out"):
        if reason in result:
            return f"{part:8}{reason.replace('_', ' ')}: {result[reason]}"
    if part == "parity":
        lines = []
        for row in result["rows"]:
            head = f"parity  {row['dtype']:9}{row['attention']:8}"
            if "refused" in row:
                lines.append(f"{head}not here: {row['refused']}")
                continue
            verdict = "passed" if row["passed"] else "FAILED"
            lines.append(
                f"{head}{verdict}: scores off by {row['score_error']:.1e} of the largest, gradients cosine "
                f"{row['gradient_cosine']:.6f}, norm {row['gradient_norm_ratio']:.4f}, leaks {row['leaks']}"
            )
        return "\n".join(lines)
    lines = []
    for what in ("score", "train"):
        row = result[what]
        mfu = f"{row['mfu']:.1%}" if row["mfu"] is not None else "-"
        memory = f"{row['peak_bytes'] / GIB:.1f} GiB" if row["peak_bytes"] else "-"
        lines.append(
            f"{part:8}{what:6}{row['seconds']:8.3f} s a step  {row['tokens_per_second']:10,.0f} tokens/s  MFU {mfu}  "
            f"peak {memory}  first step {row['first_step_s']:.0f} s  ({result['attention']}, {result['device']})"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(flags.run(CheckConfig, main))
