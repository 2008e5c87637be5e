"""The frontier: accuracy against computed tokens for ways to batch and to weigh the same labels.

The name of a treatment has all parameters, such as "together0.node.negatives1.step1000.train200000.rate0.002":
trajectories of a record that stay together (--record_chunk; 1 shuffles them one by one in rows that share nothing),
--label_weight, --negative_weight, --batch_tokens, tokens that the run computes, learning rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

from cfprm_jax.config import LABEL_WEIGHTS
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.treatment import Treatment
from cfprm_jax.options import Options, option, whole_number

_T = TypeVar("_T")
MATCH = "match"
_NAME = re.compile(
    r"together(?P<together>\d+)\.(?P<weight>[a-z]+)\.negatives(?P<negative>[\d.e+-]+|match)\.step(?P<step>\d+)"
    r"\.train(?P<train>\d+)\.rate(?P<rate>[\d.e+-]+)"
)


@dataclasses.dataclass(frozen=True)
class FrontierConfig(Options):
    """Axes of --grid=frontier; every combination is a cell."""

    together: tuple[str, ...] = option(
        ("1", "4", "0"),
        "Trajectories of a record that stay together; 1 shuffles all one by one (--packing=sequence), 0 keeps records "
        "whole.",
        kind="list",
    )
    label_weights: tuple[str, ...] = option(
        ("trajectory", "node"),
        "As --label_weight; question is for q_ranking alone.",
        choices=LABEL_WEIGHTS,
        kind="list",
    )
    negative_weights: tuple[str, ...] = option(
        ("1",),
        "As --negative_weight, a control for bce and mse by trajectory; match gives negatives the share that they have "
        "of the distinct steps.",
        kind="list",
    )
    step_tokens: tuple[str, ...] = option(("1000",), "Computed tokens per optimizer step.", kind="list")
    train_tokens: tuple[str, ...] = option(
        ("100000", "400000", "1600000"),
        "Computed tokens of a run; the data is passed over as often as needed.",
        kind="list",
    )
    learning_rates: tuple[str, ...] = option(
        ("2e-3",), "Peak learning rates; for each of the rest the best on the validation set is reported.", kind="list"
    )


def treatments(axes: FrontierConfig, loss: str) -> list[str]:
    """The names of all treatments of a loss: controls by weight only where a loss has them.

    Raises:
      UserError: an axis is empty, names something twice, or holds what is no value of it.
    """
    together = _whole("--together", axes.together, 0, 1 << 20)
    steps = _whole("--step_tokens", axes.step_tokens, 1, 1 << 30)
    trains = _whole("--train_tokens", axes.train_tokens, 1, 1 << 50)
    rates = _numbers("--learning_rates", axes.learning_rates)
    weights = [MATCH if text == MATCH else _numbers("--negative_weights", [text])[0] for text in axes.negative_weights]
    if not axes.label_weights or not weights:
        raise UserError("--label_weights and --negative_weights must not be empty")
    out = []
    for chunk, label, negative, step, train, rate in itertools.product(
        together, axes.label_weights, weights, steps, trains, rates
    ):
        if negative != 1 and (loss == "q_ranking" or label != "trajectory"):
            continue
        if label == "question" and loss != "q_ranking":
            continue
        shown = negative if negative == MATCH else f"{negative:g}"
        out.append(f"together{chunk}.{label}.negatives{shown}.step{step}.train{train}.rate{rate:g}")
    return out


def treatment(name: str) -> Treatment:
    """The treatment of a name.

    Raises:
      KeyError: the name is not that of a treatment.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise KeyError(name)
    chunk, negative = int(match["together"]), match["negative"]
    return Treatment(
        name,
        ("1",),
        packing="sequence" if chunk == 1 else "tree",
        record_chunk=chunk,
        label_weight=match["weight"],
        negative_weight=0.0 if negative == MATCH else float(negative),
        batch_tokens=int(match["step"]),
        train_tokens=int(match["train"]),
        learning_rate=float(match["rate"]),
    )


def without_rate(name: str) -> str:
    """The name of a treatment without its learning rate, which is what rates are chosen for."""
    return name.rsplit(".rate", 1)[0]


def _whole(flag: str, texts: Sequence[str], lower: int, upper: int) -> list[int]:
    return _distinct(flag, [whole_number(text, flag, lower, upper) for text in texts])


def _numbers(flag: str, texts: Sequence[str]) -> list[float]:
    numbers = []
    for text in texts:
        try:
            numbers.append(float(text))
        except ValueError:
            raise UserError(f"{flag}: {text!r} is not a number") from None
        if not 0 < numbers[-1] < float("inf"):
            raise UserError(f"{flag}: {text!r} is not a positive number")
    return _distinct(flag, numbers)


def _distinct(flag: str, values: list[_T]) -> list[_T]:
    if not values or len(set(values)) != len(values):
        raise UserError(f"{flag} is empty or names something twice")
    return values
