"""The lines that describe a run at its start: model, corpus, steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cfprm_jax.config import (
    GranularityConfig,
    LossConfig,
    OptimizerConfig,
    PackingConfig,
    finest_first,
    parse_granularity,
)
from cfprm_jax.data.corpus_report import distinct_line
from cfprm_jax.data.loader import Loader
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.runtime.progress import counted
from cfprm_jax.training.optimizer import learning_rate_schedule

# Half a unit in the last place of a bfloat16 weight of 0.02, a usual size; about 50 steps at 2e-6 with a cosine.
_LITTLE_MOVEMENT = 5e-5
# Occurrences of a distinct labelled step from which on repeats outweigh what differs.
_OFTEN = 3
# Batch shapes that are listed; the rest are counted.
_SHAPES_NAMED = 6


def model(config: PRMConfig, directory: str, weights: str = "float32") -> str:
    """Size and architecture of the network, and the type of its weights."""
    net = config.backbone
    return (
        f"{directory}: {parameters.count(config):,} parameters, "
        f"{counted(net.num_hidden_layers, 'layer')} of {net.hidden_size}, "
        f"{config.head} head{' with redundancy' if config.redundancy else ''}; {weights} weights, computed in "
        f"{config.dtype}, attention {config.attention}, remat {config.remat}"
    )


def corpus(report: dict[str, Any]) -> Iterator[str]:
    """Lines about rows and about each granularity, with counts of all that was skipped or truncated."""
    bad = f", {counted(len(report['bad_rows']), 'malformed row')} skipped" if report["bad_rows"] else ""
    yield (
        f"{counted(report['rows'], 'row')} of {counted(len(report['files']), 'file')}, "
        f"{counted(report['trajectories'], 'trajectory')}{bad}"
    )
    yield from (f"left out: {number:,} {what}" for what, number in report["left_out"].items() if number)
    for granularity, counts in report["granularities"].items():
        labels = ", ".join(f"{number:,} {kind}" for kind, number in counts["labels"].items() if number)
        line = (
            f"C={granularity}: {counted(counts['trajectories'], 'trajectory')}, {counted(counts['steps'], 'step')} "
            f"({labels})"
        )
        if counts["redundant_steps"]:
            line += f", {counts['redundant_steps']:,} redundant and {counts['useful_steps']:,} of use"
        if counts["truncated"]:
            line += f", {counts['truncated']:,} truncated ({counted(counts['windows_cut'], 'window')} cut)"
        line += "".join(f", {number:,} skipped: {why}" for why, number in counts["skipped"].items() if number)
        share = counts["tokens_expanded"] / max(counts["tokens_distinct"], 1)
        yield f"{line}; {counted(counts['tokens_expanded'], 'token')}, {share:.1f} times the distinct ones"
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
        f"loss {loss.loss} by {loss.label_weight}{_second(loss)}, packing {packing.packing} into "
        f"{'rows of one shape' if len(shapes) == 1 else f'at most {len(shapes)} shapes of rows'}: {named}{more}"
    )


def little_movement(config: OptimizerConfig, num_steps: int) -> str | None:
    """A note on a run whose learning rates add up to so little that no weight can move; None for any other.

    An update of AdamW moves a weight by about the learning rate at most, so their sum bounds how far a run moves it.
    """
    places = np.linspace(0, num_steps - 1, min(num_steps, 1000))
    moved = num_steps * float(np.mean(np.asarray(learning_rate_schedule(config, num_steps)(places))))
    if not config.learning_rate or moved >= _LITTLE_MOVEMENT:
        return None
    return (
        f"{counted(num_steps, 'step')} at learning rates of at most {config.learning_rate:g} move a weight by about "
        f"{moved:.1g} at most, which is too little to learn: raise --learning_rate or the number of steps "
        "(--epochs_per_granularity, a smaller --batch_size)"
    )


def repeated_labels(report: Mapping[str, Any], packing: PackingConfig, loss: LossConfig) -> str | None:
    """A note on a corpus whose labelled steps repeat in many trajectories that each count; None for any other.

    Args:
      report: of the corpus, as in corpus.json.
    """
    finest = min(map(parse_granularity, report["granularities"]), key=finest_first)
    counts = report["granularities"][str(finest)]
    times = counts["labelled_steps"] / max(counts["distinct_labelled_steps"], 1)
    if loss.label_weight != "trajectory" or times < _OFTEN:
        return None
    size = packing.batch_tokens or round(packing.batch_size * counts["tokens_expanded"] / counts["trajectories"])
    return (
        f"a distinct labelled step occurs {times:.1f} times on average, and counts as often. --packing=tree "
        f"--record_chunk=0 --label_weight=node --batch_tokens={size} trains on each once, in steps of as many computed "
        "tokens and fewer steps an epoch (docs/label_weight.md)"
    )


def _second(loss: LossConfig) -> str:
    return f" and {loss.redundancy_weight:g} times redundancy" if loss.redundancy else ""


def _size(packing: PackingConfig, loader: Loader) -> str:
    if packing.batch_tokens:
        return f"at most {packing.batch_tokens:,} computed tokens (up to {counted(loader.trajectories, 'trajectory')})"
    return counted(packing.batch_size, "trajectory")
