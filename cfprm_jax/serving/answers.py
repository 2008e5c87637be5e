"""Scores to the bodies of answers, as each protocol has them. Pure functions of request and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from cfprm_jax.inference.prefix_rows import Tokens
from cfprm_jax.inference.rows import decimals, sigmoid
from cfprm_jax.serving.requests import MarkedRequest, StepsRequest

Outputs = Sequence[Float32[np.ndarray, "steps outputs"]]
"""The head's outputs at the score positions of each sequence."""

# As in vLLM from 0.32 on.
_DETAILS = {"prompt_tokens_details": None, "completion_tokens_details": None}


def usage(sequences: Sequence[Tokens]) -> dict[str, int]:
    """Tokens of a request, as OpenAI counts them: those that come from a cache, too."""
    total = sum(len(sequence.tokens) for sequence in sequences)
    return {"prompt_tokens": total, "total_tokens": total}


def steps(request: StepsRequest, sequences: Sequence[Tokens], outputs: Outputs) -> dict[str, Any]:
    """The answer of /v1/steps: a score in [0, 1] for every step."""

    def shaped(values: list[list[float]]) -> list[Any]:
        return values[0] if request.single else values

    answer: dict[str, Any] = {"scores": shaped([sigmoid(z[:, 0]).tolist() for z in outputs])}
    if request.logits:
        answer["logits"] = shaped([decimals(z[:, 0]) for z in outputs])
    if outputs[0].shape[1] > 1:
        answer["redundancy"] = shaped([sigmoid(z[:, 1]).tolist() for z in outputs])
    return {**answer, "usage": usage(sequences)}


def pooling(
    request: MarkedRequest, sequences: Sequence[Tokens], outputs: Outputs, envelope: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer of /pooling: for each marker the two labels' probabilities, or their logits.

    Args:
      envelope: "id", "created" and "model".
    """
    return {
        **envelope,
        "object": "list",
        "data": [
            {"index": i, "object": "pooling", "data": _labels(z[:, 0], request.activation)}
            for i, z in enumerate(outputs)
        ],
        "usage": {**usage(sequences), "completion_tokens": 0, **_DETAILS},
    }


def classify(
    request: MarkedRequest, sequences: Sequence[Tokens], outputs: Outputs, envelope: Mapping[str, Any]
) -> dict[str, Any]:
    """The answer of /classify: the two labels of the last step."""
    data = []
    for i, z in enumerate(outputs):
        (values,) = _labels(z[-1:, 0], request.activation)
        label = f"LABEL_{int(z[-1, 0] > 0)}"
        data.append({"index": i, "label": label, "probs": values, "num_classes": 2})
    return {
        **envelope,
        "object": "list",
        "data": data,
        "usage": {**usage(sequences), "completion_tokens": 0, **_DETAILS},
    }


def value(request: MarkedRequest, outputs: Outputs) -> dict[str, Any]:
    """The answer of /worker_value_inference: the scores of each text; of a single text a flat list."""
    scores = [sigmoid(z[:, 0]).tolist() for z in outputs]
    return {"value": scores[0] if request.single else scores}


def models(name: str, created: int, max_length: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    entry = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "cfprm_jax",
        "root": name,
        "parent": None,
        "max_model_len": max_length,
    }
    return {"object": "list", "data": [entry]}


def _labels(z: Float32[np.ndarray, " steps"], activation: bool) -> list[list[float]]:
    """[[1 - p, p], ...], or the logits [[0, z], ...] whose softmax that is: an export has a row of zeros beside z's."""
    if not activation:
        return [[0.0, value] for value in decimals(z)]
    return np.stack([sigmoid(-z), sigmoid(z)], axis=1).tolist()
