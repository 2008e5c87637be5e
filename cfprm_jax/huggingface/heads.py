"""Reward heads of published PRMs: tensors of a Hugging Face directory, and the parameters that they become.

`score` is Linear (transformers' ...ForTokenClassification); `score.0`, ReLU, `score.2` are Linear, ReLU, Linear
(Qwen2ForProcessRewardModel, Qwen2ForRewardModel). With two labels the parameter is the difference of their rows, taken
in float32: the softmax's second probability is the sigmoid of the difference, and the rows' common part, which no
score depends on, is not kept. A third label, in an export whose prm.json declares it, is the redundancy output: a
separate logit, which has no part in that softmax. So exporting a published two-label head does not reproduce its rows:
it writes their difference and a row of zeros.

The two-layer form in which export writes a linear head (rows w and -w, ReLU, difference) is recognised by its exact
values and becomes the linear head again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from cfprm_jax.huggingface.safetensors_files import DTYPES, StoredTensor

_FOLDED = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")


def kind_by_names(names: Iterable[str]) -> str | None:
    """ "linear", "mlp" or None for no head, going by the names of tensors alone."""
    names = set(names)
    if any(name.startswith(("score.0.", "score.2.")) for name in names):
        return "mlp"
    return "linear" if names & {"score.weight", "score.bias"} else None


def is_folded(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether the two layers that a directory holds are a linear head: z = relu(wx + b) - relu(-(wx + b)).

    Reads values only if names, shapes and types could be such a head, and the first layer only if the second is.
    """
    if any(name not in tensors or tensors[name].dtype not in DTYPES for name in _FOLDED):
        return False
    weight, bias, output, output_bias = (tensors[name] for name in _FOLDED)
    width = weight.shape[0] if weight.shape else 0
    if width < 2 or weight.shape != (width, width) or bias.shape != (width,):
        return False
    if output.shape not in ((1, width), (2, width)) or output_bias.shape != output.shape[:1]:
        return False
    signs = np.zeros(output.shape, np.float32)
    signs[-1, :2] = 1, -1
    if not np.array_equal(_values(output), signs) or _values(output_bias).any():
        return False
    return all(_is_pair(_values(tensor)) for tensor in (bias, weight))


def _is_pair(values: np.ndarray) -> bool:
    """Whether entry 1 is minus entry 0, and all others are 0."""
    return np.array_equal(values[1], -values[0]) and not values[2:].any()


def output_row(tensor: StoredTensor) -> np.ndarray:
    """The weights of z, float32 [1, ...]: the row of one label, or the difference of the first two labels' rows."""
    values = _values(tensor)
    return values if len(values) == 1 else values[1:2] - values[:1]


def third_row(tensor: StoredTensor) -> np.ndarray:
    """The weights of the redundancy logit, float32 [1, ...]: the row of the third of three labels."""
    return _values(tensor)[2:3]


def unfolded_row(tensor: StoredTensor) -> np.ndarray:
    """The linear head in `score.0.weight` or `score.0.bias`, where :func:`is_folded` is true."""
    return _values(tensor)[:1]


def _values(tensor: StoredTensor) -> np.ndarray:
    return tensor.read().astype(np.float32)
