"""Metrics of a PRM on the held-out split: loss, accuracy, F1 of wrong steps, AUROC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from cfprm_jax.data.loader import Batch
from cfprm_jax.data.packing import PackedBatch
from cfprm_jax.sharding import rules
from cfprm_jax.training.step import outputs

DISTINCT = "distinct_"
"""Prefix of the metrics over distinct steps."""


def binary_metrics(step_logits: Float[np.ndarray, " steps"], labels: Float[np.ndarray, " steps"]) -> dict[str, float]:
    """Accuracy at sigmoid(z) > 0.5; precision, recall and F1 of the *negative* class; AUROC.

    A label above 0.5 is positive. Wrong steps are the rare class, hence the F1 of the negative class.
    A metric without a value (AUROC with one class, precision without a predicted negative) is NaN.

    Args:
      step_logits: z of labelled steps.
      labels: in [0, 1], none NaN.
    """
    truth, predicted = labels > 0.5, step_logits > 0.0
    hit = float(np.sum(~truth & ~predicted))  # negatives found
    false_alarm, missed = float(np.sum(truth & ~predicted)), float(np.sum(~truth & predicted))
    return {
        "step_accuracy": _ratio(float(np.sum(truth == predicted)), float(len(truth))),
        "negative_precision": _ratio(hit, hit + false_alarm),
        "negative_recall": _ratio(hit, hit + missed),
        "negative_f1": _ratio(2 * hit, 2 * hit + false_alarm + missed),
        "auroc": auroc(step_logits, truth),
        "positives": float(truth.sum()),
        "negatives": float((~truth).sum()),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def auroc(scores: Float[np.ndarray, " n"], positive: np.ndarray) -> float:
    """Probability that a random positive scores above a random negative, a tie counting one half (Mann-Whitney)."""
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative or np.isnan(scores).any():
        return float("nan")
    _, which, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[which]  # from 1; equal scores share the mean of theirs
    above = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(above / (num_positive * num_negative))


def evaluate(
    eval_step: Callable[[Any, PackedBatch], tuple[jax.Array, jax.Array, jax.Array]],
    batches: Sequence[Batch],
    shardings: PackedBatch,
    params: Any,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Loss and binary metrics over all batches; None without batches, or once stop() is true.

    Metrics over all labelled steps come first, those over distinct ones under the same names after "distinct_". The
    loss is that of training without the redundancy output; with --label_weight=node it counts a step once a batch. A
    redundancy output adds its AUROC over distinct steps.

    Args:
      eval_step: (params, batch) -> (z, total, count), as from training.step.jit_eval_step.
      shardings: of a batch.
    """
    if not batches:
        return None
    total = count = 0.0
    every: list[tuple[np.ndarray, np.ndarray]] = []
    once: list[tuple[np.ndarray, np.ndarray]] = []
    second: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in batches:
        if stop():
            return None
        out, batch_total, batch_count = eval_step(params, rules.put_batch(batch.packed, shardings))
        z, redundancy = outputs(np.asarray(out))
        every.append(_labelled(z, np.asarray(batch.packed.labels)))
        if batch.distinct_labels is not None:
            once.append(_labelled(z, batch.distinct_labels))
        if redundancy is not None and batch.packed.redundancy is not None:
            second.append(_labelled(redundancy, np.asarray(batch.packed.redundancy)))
        total, count = total + float(batch_total), count + float(batch_count)
    metrics = {"loss": _ratio(total, count), **_metrics(every)}
    if once:
        metrics |= {f"{DISTINCT}{name}": value for name, value in _metrics(once).items()}
    if second:
        u, targets = (np.concatenate([pair[side] for pair in second]) for side in (0, 1))
        redundant = targets > 0.5
        metrics |= {
            "redundancy_auroc": auroc(u, redundant),
            "redundant": float(redundant.sum()),
            "of_use": float((~redundant).sum()),
        }
    return metrics


def _labelled(z: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    known = ~np.isnan(labels)
    return z[known], labels[known]


def _metrics(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    return binary_metrics(np.concatenate([z for z, _ in parts]), np.concatenate([y for _, y in parts]))
