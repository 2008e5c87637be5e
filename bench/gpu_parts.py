"""The parts of gpu_check.py, each of which runs in a separate process."""

from __future__ import annotations

import os

# A peak of 60 of 80 GB is all that JAX takes by default.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import dataclasses
import functools
import hashlib
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_options import CheckConfig
from networks import build, random_state

from cfprm_jax import losses
from cfprm_jax.config import DeviceConfig, LossConfig, ModelConfig, OptimizerConfig
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.errors import UserError
from cfprm_jax.models import attention, parameters, prm
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.planning.shapes import known_backbone
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.runtime import devices
from cfprm_jax.sharding import rules
from cfprm_jax.training import flops, step
from cfprm_jax.training.program import Program

Report = Callable[[dict[str, Any]], None]
"""Records the result of a part so far; the last call counts."""

TINY = BackboneConfig(256, 64, 128, 2, 4, 2, 16)
SMALL = BackboneConfig(4096, 896, 2048, 4, 14, 2, 64)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The tolerance of a result against float32 on the CPU.

    Attributes:
      error: of the largest entry.
      cosine: least, of all gradients as one vector.
      least_cosine: least, of any parameter that has a hundredth of the gradients' norm.
      norm: of the gradients' norms, how far their ratio is from 1.
    """

    error: float
    cosine: float
    least_cosine: float
    norm: float

    def passes(self, row: dict[str, Any]) -> bool:
        return (
            row["error"] < self.error
            and row["cosine"] > self.cosine
            and row["least_cosine"] > self.least_cosine
            and abs(row["norm_ratio"] - 1) < self.norm
        )


# bfloat16 has 8 bits.
TOLERANCE = {"bfloat16": Tolerance(0.05, 0.99, 0.95, 0.03), "float32": Tolerance(1e-3, 0.99999, 0.9999, 1e-3)}


def run(config: CheckConfig, report: Report) -> None:
    """The part that is named."""
    name, _, backend = config.part.partition("_")
    if name == "parity":
        parity(config, backend, report)
    elif name == "determinism":
        repeat(config, report)
    elif name == "attention":
        compare_attention(config, report)
    else:
        measure(config, config.part, report)


def is_small(config: CheckConfig) -> bool:
    return config.shapes == ("tiny",)


def where_it_ran(device: jax.Device) -> dict[str, Any]:
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


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


def compare(what: str, found: np.ndarray, expected: np.ndarray, grads: Any, expected_grads: Any) -> dict[str, Any]:
    """A row of figures: values, and gradients given as trees of arrays."""
    pairs = [
        (np.ravel(np.asarray(a, np.float32)), np.ravel(np.asarray(b, np.float32)))
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True)
    ]
    products = np.array([[_dot(a, b), _dot(a, a), _dot(b, b)] for a, b in pairs])
    both, own, theirs = products.sum(axis=0)
    matter = products[:, 2] > 1e-4 * theirs
    cosines = products[matter, 0] / np.sqrt(products[matter, 1] * products[matter, 2])
    return {
        "what": what,
        "error": float(np.abs(found - expected).max() / np.abs(expected).max()),
        "cosine": float(both / np.sqrt(own * theirs)),
        "least_cosine": float(cosines.min()),
        "norm_ratio": float(np.sqrt(own / theirs)),
    }


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Summed in float64: a sum of 30 million products in float32 is good to three digits."""
    return float(np.sum(a * b, dtype=np.float64))


def parity(config: CheckConfig, backend: str, report: Report) -> None:
    """Scores and gradients against the CPU's float32, and whether any branch leaks into another."""
    net = TINY if is_small(config) else SMALL
    batch = make_batch(2, min(config.length, 512), net.vocab_size)
    device, cpu = devices.select(config.platform)[0], jax.devices("cpu")[0]
    loss = losses.loss_function(LossConfig())
    with jax.default_device(cpu):
        init = functools.partial(parameters.init_params, PRMConfig(net))
        params = jax.jit(init)(jax.random.key(0))

    def evaluate(network: PRMConfig, where: jax.Device) -> tuple[np.ndarray, list[np.ndarray]]:
        def objective(params: Any, batch: PackedBatch) -> tuple[jax.Array, jax.Array]:
            z = step.step_logits(functools.partial(prm.apply, network), params, batch)
            total, count = loss(z, jnp.asarray(batch.labels))
            return total / count, z

        placed = jax.device_put((params, batch), where)
        grads, z = jax.jit(jax.grad(objective, has_aux=True))(*placed)
        return np.asarray(z), [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]

    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"rows": rows, **where_it_ran(device)}
    expected = None
    for dtype, tolerance in TOLERANCE.items():
        try:
            network = PRMConfig(net, dtype=dtype, attention=resolved(backend, device, net, dtype))
        except UserError as error:
            result["refused"] = str(error)
            continue
        expected = expected or kept(config, lambda: evaluate(PRMConfig(net, dtype="float32"), cpu))
        found = evaluate(network, device)
        row = {"dtype": dtype, "attention": backend, **compare("scores", found[0], expected[0], found[1], expected[1])}
        row["leaks"] = leaks(network, jax.device_put(params, device), batch, device)
        row["passed"] = tolerance.passes(row) and not row["leaks"]
        rows.append(row)
        report(result)
    report(result)


def resolved(backend: str, device: jax.Device, net: BackboneConfig, dtype: str) -> str:
    heads = {"heads": net.num_attention_heads, "kv_heads": net.num_key_value_heads, "head_dim": net.head_dim}
    return attention.resolve(backend, device.platform, dtype, **heads)


def kept(config: CheckConfig, compute: Callable[[], tuple[np.ndarray, list[np.ndarray]]]) -> tuple[np.ndarray, list]:
    """The reference results from --scratch, or computed and stored there for the next process."""
    if not config.scratch:
        return compute()
    path = pathlib.Path(config.scratch) / "reference.npz"
    if not path.exists():
        scores, grads = compute()
        partial = path.with_name("partial.npz")
        np.savez(partial, scores, *grads)
        partial.rename(path)
        return scores, grads
    with np.load(path) as arrays:
        scores, *grads = (arrays[f"arr_{number}"] for number in range(len(arrays.files)))
    return scores, grads


def leaks(network: PRMConfig, params: Any, batch: PackedBatch, device: jax.Device) -> bool:
    """Whether other tokens in the last branch of the first row change a score that does not see it."""
    scores = jax.jit(functools.partial(step.step_logits, functools.partial(prm.apply, network)))
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


def built_for(config: CheckConfig, backbone: BackboneConfig, device: jax.Device) -> Program:
    """The program of a run on one device, as train builds it."""
    options = TrainConfig(
        model=ModelConfig(dtype="bfloat16", remat="layer", deterministic=config.deterministic),
        optimizer=OptimizerConfig(optimizer=config.optimizer),
    )
    return build(options, backbone, rules.make_mesh(DeviceConfig(mesh="data=1"), [device]))


def timed(config: CheckConfig, advance: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of a call, after two that compile and settle."""
    started = time.perf_counter()
    jax.block_until_ready(advance())
    first = time.perf_counter() - started
    jax.block_until_ready(advance())
    seconds = []
    for _ in range(config.steps):
        started = time.perf_counter()
        jax.block_until_ready(advance())
        seconds.append(time.perf_counter() - started)
    return {"first_step_s": first, "seconds": statistics.median(seconds), "spread_s": max(seconds) - min(seconds)}


def measure(config: CheckConfig, name: str, report: Report) -> None:
    """Training and scoring of one shape: seconds a step, tokens/s, MFU and peak memory of each."""
    backbone = TINY if name == "tiny" else known_backbone(f"Qwen2.5-{name}")
    if backbone is None:
        raise UserError(f"--shapes: {name!r} is no size of Qwen2.5")
    device = devices.select(config.platform)[0]
    built = built_for(config, backbone, device)
    network = built.network
    host = make_batch(config.rows, config.length, backbone.vocab_size)
    batch = rules.put_batch(host, built.batch_shardings)
    tokens = config.rows * config.length
    arithmetic = flops.train_flops(network, tokens, flops.visible_pairs(host, tokens))
    peak = flops.peak_flops(device.device_kind)
    result: dict[str, Any] = {
        "attention": network.attention,
        "parameters": parameters.count(network),
        **where_it_ran(device),
    }
    state = random_state(built)

    def figures(advance: Callable[[], Any], work: float) -> dict[str, Any]:
        out = timed(config, advance)
        used = (device.memory_stats() or {}).get("peak_bytes_in_use")
        mfu = work / out["seconds"] / peak if peak else None
        return {**out, "tokens_per_second": tokens / out["seconds"], "mfu": mfu, "peak_bytes": used}

    # Scoring first: a peak is of all that ran before, and training needs more.
    result["score"] = figures(lambda: built.eval_step(state.params, batch), arithmetic / 3)
    report(result)

    def train() -> Any:
        nonlocal state
        state, metrics = built.train_step(state, batch)
        return metrics

    result["train"] = figures(train, arithmetic)
    result["loss_is_finite"] = bool(np.isfinite(float(train()["loss"])))
    report(result)


def repeat(config: CheckConfig, report: Report) -> None:
    """Three steps from the same state, twice: a digest of all that they leave; then seconds a step."""
    device = devices.select(config.platform)[0]
    backbone = TINY
    if not is_small(config):  # a real vocabulary, whose gradients are scattered
        backbone = dataclasses.replace(known_backbone("Qwen2.5-0.5B") or TINY, num_hidden_layers=4)
    built = built_for(config, backbone, device)
    batch = rules.put_batch(make_batch(config.rows, config.length, backbone.vocab_size), built.batch_shardings)
    digests = []
    for _ in range(2):
        state = random_state(built)
        for _ in range(3):
            state, metrics = built.train_step(state, batch)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((state, metrics)):
            digest.update(np.asarray(leaf).tobytes())
        digests.append(digest.hexdigest())

    def train() -> Any:
        nonlocal state
        state, metrics = built.train_step(state, batch)
        return metrics

    result = {"digests": digests, "attention": built.network.attention, **where_it_ran(device)}
    report({**result, "seconds": timed(config, train)["seconds"]})


def compare_attention(config: CheckConfig, report: Report) -> None:
    """One layer of the 7B's attention, forward and backward: every backend against xla in float32, and its seconds."""
    net = TINY if is_small(config) else known_backbone("Qwen2.5-7B") or TINY
    device = devices.select(config.platform)[0]
    batch = make_batch(config.rows, config.length, 2)
    ends = jax.device_put(batch.subtree_end, device)
    heads = (net.num_attention_heads, net.num_key_value_heads, net.num_key_value_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(config.rows, config.length, number, net.head_dim) for number in (*heads, heads[0])]
    # Rounded already, so that all backends get the same numbers.
    wide = [
        jax.device_put(jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float32), device)
        for key, shape in zip(keys, shapes, strict=True)
    ]

    def both_ways(backend: str) -> Callable[..., Any]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, pull: jax.Array) -> Any:
            out, back = jax.vjp(lambda *args: attention.attention(*args, ends, backend), q, k, v)
            return out, back(pull)

        return jax.jit(run)

    expected = jax.tree.map(np.asarray, both_ways("xla")(*wide))
    inputs = [x.astype(jnp.bfloat16) for x in wide]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"rows": rows, "not_here": {}, **where_it_ran(device)}
    for backend in attention.BACKENDS:
        try:
            resolved(backend, device, net, "bfloat16")
        except UserError as error:
            result["not_here"][backend] = str(error)
            continue
        function = both_ways(backend)
        out, grads = jax.tree.map(lambda x: np.asarray(x, np.float32), function(*inputs))
        row = {"attention": backend, **compare("values", out, expected[0], grads, expected[1])}
        row["passed"] = TOLERANCE["bfloat16"].passes(row)
        rows.append({**row, **timed(config, lambda function=function: function(*inputs))})
        report(result)
    report(result)
