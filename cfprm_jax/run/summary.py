"""The lines that describe a run at its start: model, corpus, steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cfprm_jax.config import GranularityConfig, LossConfig, PackingConfig
from cfprm_jax.data.corpus_report import distinct_line
from cfprm_jax.data.loader import Loader
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig

# Batch shapes that are listed; the rest are counted.
_SHAPES_NAMED = 6


def model(config: PRMConfig, directory: str, weights: str = "float32") -> str:
    """Size and architecture of the network, and the type of its weights."""
    net = config.backbone
    return (
        f"{directory}: {parameters.count(config):,} parameters, {net.num_hidden_layers} layers of {net.hidden_size}, "
        f"{config.head} head{' with redundancy' if config.redundancy else ''}; {weights} weights, computed in "
        f"{config.dtype}, attention {config.attention}, remat {config.remat}"
    )


def corpus(report: dict[str, Any]) -> Iterator[str]:
    """Lines about rows and about each granularity, with counts of all that was skipped or truncated."""
    bad = f", {len(report['bad_rows']):,} malformed rows skipped" if report["bad_rows"] else ""
    yield f"{report['rows']:,} rows of {len(report['files'])} file(s), {report['trajectories']:,} trajectories{bad}"
    yield from (f"left out: {number:,} {what}" for what, number in report["left_out"].items() if number)
    for granularity, counts in report["granularities"].items():
        labels = ", ".join(f"{number:,} {kind}" for kind, number in counts["labels"].items() if number)
        line = f"C={granularity}: {counts['trajectories']:,} trajectories, {counts['steps']:,} steps ({labels})"
        if counts["redundant_steps"]:
            line += f", {counts['redundant_steps']:,} redundant and {counts['useful_steps']:,} of use"
        if counts["truncated"]:
            line += f", {counts['truncated']:,} truncated ({counts['windows_cut']:,} windows cut)"
        line += "".join(f", {number:,} skipped: {why}" for why, number in counts["skipped"].items() if number)
        share = counts["tokens_expanded"] / max(counts["tokens_distinct"], 1)
        yield f"{line}; {counts['tokens_expanded']:,} tokens, {share:.1f} times the distinct ones"
        yield f"C={granularity}: {distinct_line(counts)}"


def steps(
    num_steps: int, loader: Loader, granularity: GranularityConfig, packing: PackingConfig, loss: LossConfig
) -> str:
    """Number of steps, batch size, granularities, loss and batch shapes."""
    shapes = loader.shapes.all()
    named = ", ".join(f"{rows} x {length}" for rows, length in shapes[:_SHAPES_NAMED])
    more = f" and {len(shapes) - _SHAPES_NAMED} more" if len(shapes) > _SHAPES_NAMED else ""
    order = ", ".join(map(str, granularity.stages))
    cut = f" (of {loader.num_steps:,}: --max_steps)" if num_steps < loader.num_steps else ""
    return (
        f"{num_steps:,}{cut} of {_size(packing, loader)}, granularities {order} ({granularity.schedule}), "
        f"loss {loss.loss} by {loss.label_weight}{_second(loss)}, packing {packing.packing} into at most {len(shapes)} "
        f"shapes of rows: {named}{more}"
    )


def _second(loss: LossConfig) -> str:
    return f" and {loss.redundancy_weight:g} times redundancy" if loss.redundancy else ""


def _size(packing: PackingConfig, loader: Loader) -> str:
    if packing.batch_tokens:
        return f"at most {packing.batch_tokens:,} computed tokens (up to {loader.trajectories:,} trajectories)"
    return f"{packing.batch_size} trajectories"
