"""python bench/profile_step.py --output=FILE.json: where a train step's time goes, and how far from the peak it is.

Four tables. The machine: a plain matrix product and a plain pass over memory, in this run. The step: its time beside
what the model needs (training.flops) and what XLA counts as computed and moved, and what these are of the machine's.
Its parts: each compiled alone, then the same step traced by JAX's profiler and its operations summed by what they do.
The host: microseconds a step of making a batch, sending it, starting the step and reporting it, each alone, and then as
the training loop runs them, beside the step: what is left of them when they run at the same time.

--model=DIRECTORY takes the shape (config.json) and the tokenizer from there, with random weights; without it the shape
is --hidden and --layers and the tokenizer the quickstart's. --train_data are any corpora; without them one is made.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import (
    copy_bytes_per_second,
    matrix_product_flops,
    seconds_of,
    select_devices,
    take_turns,
    write_json,
)
from profile_run import ProfileConfig, Run
from traces import seconds_by_kind

from cfprm_jax import flags, losses
from cfprm_jax.data.loader import Batch
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.models import embedding, parameters, prm
from cfprm_jax.models.attention import attention
from cfprm_jax.run.loggers import LoggedRun, Loggers
from cfprm_jax.run.metrics import MetricLog, Progress
from cfprm_jax.runtime import config_files
from cfprm_jax.sharding import rules
from cfprm_jax.training import optimizer, step
from cfprm_jax.training.flops import train_flops, visible_pairs


def parts_of(run: Run, placed: PackedBatch) -> dict[str, Callable[[], Any]]:
    """Calls that compute a part of the step on this batch."""
    net, params = run.network, run.state.params
    loss = losses.loss_function(run.config.loss)
    forward = functools.partial(prm.apply, net, constrain=rules.constrain_activations(run.mesh))

    def objective(params: Any) -> jax.Array:
        total, count = loss(step.step_logits(forward, params, placed), jnp.asarray(placed.labels))
        return total / count

    rows, length = placed.tokens.shape
    backbone = net.backbone
    heads = (backbone.num_attention_heads, backbone.num_key_value_heads)
    q, k = (jax.random.normal(jax.random.key(0), (rows, length, n, backbone.head_dim), net.dtype) for n in heads)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(attention(q, k, v, placed.subtree_end, net.attention).astype(jnp.float32)))

    def embedded(table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(embedding.take(table, placed.tokens, net.dtype).astype(jnp.float32)))

    def update(grads: Any, params: Any, opt_state: Any) -> Any:
        scale = optimizer.clip_scale(optimizer.global_norm(grads), run.config.optimizer.max_grad_norm)
        return run.built.tx.update(grads, scale, params, opt_state, 0)

    evaluate, gradients = jax.jit(objective), jax.jit(jax.value_and_grad(objective))
    attend, embed = jax.jit(jax.grad(mixed, argnums=(0, 1, 2))), jax.jit(jax.grad(embedded))
    # Donated as in the step; the state moves on from call to call, and the gradients stay.
    updated = jax.jit(update, donate_argnums=(1, 2))
    grads = jax.jit(jax.grad(objective))(params)

    def optimize() -> Any:
        new = updated(grads, run.state.params, run.state.opt_state)
        run.state = run.state._replace(params=new[0], opt_state=new[1])
        return new

    def all_layers() -> Any:
        for _ in range(backbone.num_hidden_layers):
            out = attend(q, k, k)
        return out

    return {
        "forward": lambda: evaluate(run.state.params),
        "forward and backward": lambda: gradients(run.state.params),
        "attention, both ways, all layers": all_layers,
        "embedding, both ways": lambda: embed(run.state.params["backbone"]["embedding"]),
        "clipping and optimizer": optimize,
        "whole step": lambda: run.step(placed),
    }


def host_alone(run: Run, log: MetricLog, progress: Progress) -> dict[str, float]:
    """Microseconds a step of each thing the host does, one after another and nothing beside them."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = function()
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    for number, k in enumerate(run.steps):
        batch = timed("making the batch", lambda k=k: run.loader.batch(k))
        placed = timed("sending it", lambda batch=batch: jax.block_until_ready(run.put(batch.packed)))
        jax.block_until_ready(run.state)
        metrics = timed("starting the step", lambda placed=placed: run.step(placed))
        timed("waiting for it", lambda metrics=metrics: jax.block_until_ready((metrics, run.state)))
        timed(
            "reporting it", lambda b=batch, m=metrics, n=number: report(run, log, progress, n + 1, batch=b, metrics=m)
        )
    return {name: 1e6 * statistics.median(values) for name, values in seconds.items()}


def report(run: Run, log: MetricLog, progress: Progress, number: int, *, batch: Batch, metrics: Any) -> None:
    """The training loop's handling of a step's metrics, without its checks."""
    values = {name: float(value) for name, value in jax.device_get(metrics).items()}
    work = train_flops(run.network, batch.tokens_computed, visible_pairs(batch.packed, batch.tokens_computed))
    rates = progress.advance(number, batch.tokens_computed, batch.tokens_expanded, work)
    log.write(number, {**values, **rates}, board="train")


def host_in_the_loop(run: Run, log: MetricLog, progress: Progress) -> dict[str, float]:
    """Microseconds a step that the loop spends on each thing when all run at once, and of the whole loop."""
    spent = dict.fromkeys(("next batch", "sending it", "starting the step", "reporting the last"), 0.0)
    iterator, pending = run.loader.iterator(), None
    count = min(2 * len(run.steps), run.loader.num_steps - 1)
    next(iterator)
    jax.block_until_ready(run.state)
    started = mark = time.perf_counter()

    def note(name: str) -> None:
        nonlocal mark
        now = time.perf_counter()
        spent[name] += now - mark
        mark = now

    for number in range(count):
        batch = next(iterator)
        note("next batch")
        placed = run.put(batch.packed)
        note("sending it")
        metrics = run.step(placed)
        note("starting the step")
        if pending is not None:
            report(run, log, progress, number, batch=pending[0], metrics=pending[1])
        pending = batch, metrics
        note("reporting the last")
    jax.block_until_ready((run.state, metrics))
    whole = time.perf_counter() - started
    iterator.close()
    return {name: 1e6 * value / count for name, value in {**spent, "the loop in all": whole}.items()}


def compile_all(run: Run) -> None:
    """Every shape of the run once, so that nothing that is timed compiles."""
    iterator = run.loader.iterator()
    shapes: dict[tuple[int, ...], PackedBatch] = {
        run.loader.batch(k).packed.tokens.shape: run.loader.batch(k).packed for k in run.steps
    }
    for _, batch in zip(range(2 * len(run.steps) + 1), iterator, strict=False):
        shapes.setdefault(batch.packed.tokens.shape, batch.packed)
    iterator.close()
    for packed in shapes.values():
        jax.block_until_ready(run.step(run.put(packed)))


def main(config: ProfileConfig) -> int:
    """All tables."""
    if config.shape.small:
        shape = dataclasses.replace(config.shape, hidden=128, layers=2, steps=4, rounds=2)
        # Few shapes: each compiles.
        config = dataclasses.replace(config, shape=shape, packing=dataclasses.replace(config.packing, row_shapes=2))
    devices = select_devices(config.shape.platform)
    dtype = config.model.dtype
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(config, devices, pathlib.Path(scratch))
        batches = sorted((run.loader.batch(k) for k in run.steps), key=lambda batch: batch.packed.tokens.size)
        chosen = batches[len(batches) // 2]
        placed = run.put(chosen.packed)
        rows, length = placed.tokens.shape
        tokens = chosen.tokens_computed
        print(
            f"{parameters.count(run.network):,} parameters, {run.network.backbone.num_hidden_layers} layers of "
            f"{run.network.backbone.hidden_size}, {dtype}, attention {run.network.attention}, "
            f"{config.optimizer.optimizer}; {chosen.trajectories} trajectories, {tokens:,} tokens of "
            f"{chosen.tokens_expanded:,} in {rows} x {length}",
            flush=True,
        )
        peaks = {name: matrix_product_flops(name) for name in dict.fromkeys(("float32", dtype))}
        copied = copy_bytes_per_second()
        for name, peak in peaks.items():
            print(f"machine     {name} matrix product {peak / 1e9:.1f} GFLOP/s")
        print(f"machine     a pass over memory {copied / 1e9:.1f} GB/s")

        calls = parts_of(run, placed)
        for call in calls.values():
            jax.block_until_ready(call())
        timed = {name: functools.partial(seconds_of, call) for name, call in calls.items()}
        turns = take_turns(timed, config.shape.rounds)
        seconds = {name: statistics.median(values) for name, values in turns.items()}
        whole = seconds["whole step"]
        needed = train_flops(run.network, tokens, visible_pairs(chosen.packed, tokens))
        computed, moved = run.xla_costs(placed)
        peak = peaks[dtype]
        step_figures = {
            "seconds": whole,
            "needed FLOPs": needed,
            "XLA FLOPs": computed,
            "XLA bytes": moved,
            "needed, share of the matrix product": needed / whole / peak,
            "XLA's, share of the matrix product": computed / whole / peak,
            "XLA's bytes, share of a pass over memory": moved / whole / copied,
        }
        print(
            f"step        {1e3 * whole:.1f} ms; needs {needed / 1e9:.2f} GFLOP ({needed / whole / peak:.0%} of the "
            f"matrix product), XLA counts {computed / 1e9:.2f} GFLOP ({computed / whole / peak:.0%}) and "
            f"{moved / 1e9:.2f} GB ({moved / whole / copied:.0%} of a pass over memory)"
        )
        for name, values in turns.items():
            print(
                f"part        {name:<38}{1e3 * seconds[name]:>10.2f} ms  ({seconds[name] / whole:>4.0%})  "
                f"{1e3 * min(values):.2f} to {1e3 * max(values):.2f}"
            )
        rest = seconds["forward and backward"] - sum(
            seconds[name] for name in ("attention, both ways, all layers", "embedding, both ways")
        )
        print(
            f"part        {'the rest of the network':<38}{1e3 * rest:>10.2f} ms  ({rest / whole:>4.0%})  by difference"
        )

        text = run.built.train_step.lower(run.state, placed).compile().as_text()  # type: ignore[attr-defined]
        traced = seconds_by_kind(lambda: jax.block_until_ready(run.step(placed)), config.shape.rounds, text)
        total = sum(traced.values())
        for kind, value in traced.items():
            print(f"traced      {kind:<38}{1e3 * value:>10.2f} ms  ({value / max(total, 1e-12):>4.0%})")

        compile_all(run)
        directory = pathlib.Path(scratch) / "run"
        loggers = Loggers(("tensorboard",), LoggedRun(directory), print)
        log = MetricLog(directory, 0, loggers=loggers)
        with pathlib.Path(scratch, "progress").open("w") as stream:
            progress = Progress(stream, 0, 10**6, 10**6)
            alone, loop = host_alone(run, log, progress), host_in_the_loop(run, log, progress)
        log.close()
        for name, value in alone.items():
            print(f"host alone  {name:<38}{value:>10.0f} us")
        for name, value in loop.items():
            print(f"host loop   {name:<38}{value:>10.0f} us")
    write_json(
        config.shape.output,
        "flax",
        devices=devices,
        config=config_files.as_dict(config),
        peaks={**peaks, "bytes_per_second": copied},
        batch={"shape": [rows, length], "tokens": tokens, "expanded": chosen.tokens_expanded},
        step=step_figures,
        parts=turns,
        traced=traced,
        host_alone_us=alone,
        host_loop_us=loop,
    )
    return 0


if __name__ == "__main__":
    sys.exit(flags.run(ProfileConfig, main))
