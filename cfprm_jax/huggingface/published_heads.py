"""Heads of published PRMs without `score`, converted to a linear head: a value head, or two rows of lm_head.

The softmax over two logits is the sigmoid of their difference, and a difference of two products is the product with the
difference of the rows; so both become Linear(hidden -> 1) in float32, and the network needs no case for them.
"""

from __future__ import annotations

import pathlib

import numpy as np

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.loading import readable
from cfprm_jax.huggingface.safetensors_files import DTYPES, StoredTensor
from cfprm_jax.models.config import BackboneConfig

VALUE_HEAD = "v_head.summary.weight"
_VALUE_BIAS = "v_head.summary.bias"
_LM_HEAD, _LM_BIAS = "lm_head.weight", "lm_head.bias"
_EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")

Head = dict[str, dict[str, np.ndarray]]
"""{"output": {"kernel": float32 [1, hidden], "bias": float32 [1]}}."""


def value_head(directory: pathlib.Path, backbone: BackboneConfig) -> Head:
    """v_head.summary, of which a bias may be missing. UserError if it is not there, or has another shape."""
    tensors = _tensors(directory)
    if VALUE_HEAD not in tensors:
        raise UserError(f"{directory} has no value head ({VALUE_HEAD}), which the encoding reads")
    kernel = _checked(tensors[VALUE_HEAD], (1, backbone.hidden_size), directory)
    bias = _checked(tensors[_VALUE_BIAS], (1,), directory) if _VALUE_BIAS in tensors else None
    return _head(_floats(kernel, 0, 1), np.zeros(1, np.float32) if bias is None else _floats(bias, 0, 1))


def vocabulary_head(directory: pathlib.Path, backbone: BackboneConfig, good: int, bad: int) -> Head:
    """z = logit of the token good - logit of the token bad; of a tied model, whose rows are the embedding's, too.

    Raises:
      UserError: no language-model head there, one of another shape, or a reward head beside it.
    """
    tensors = _tensors(directory)
    if any(name.startswith("score.") for name in tensors):
        raise UserError(f"{directory} has a reward head (score.*), but the encoding reads a language-model head")
    names = _EMBEDDINGS if backbone.tie_word_embeddings else (_LM_HEAD,)
    held = [tensors[name] for name in names if name in tensors]
    if not held:
        raise UserError(f"{directory} has no language-model head ({names[0]}), which the encoding reads")
    weight = _checked(held[0], (backbone.vocab_size, backbone.hidden_size), directory)
    bias = np.zeros(1, np.float32)
    if _LM_BIAS in tensors:
        stored = _checked(tensors[_LM_BIAS], (backbone.vocab_size,), directory)
        bias = _floats(stored, good, 1) - _floats(stored, bad, 1)
    return _head(_floats(weight, good, 1) - _floats(weight, bad, 1), bias)


def _tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for tensor in readable(directory).tensors}


def _checked(tensor: StoredTensor, shape: tuple[int, ...], directory: pathlib.Path) -> StoredTensor:
    if tensor.shape != shape or tensor.dtype not in DTYPES:
        raise UserError(
            f"{directory}: {tensor.name} has shape {list(tensor.shape)} and type {tensor.dtype}, expected "
            f"{list(shape)} and one of {', '.join(DTYPES)} (in {tensor.file.name})"
        )
    return tensor


def _floats(tensor: StoredTensor, first: int, rows: int) -> np.ndarray:
    values = np.empty((rows, *tensor.shape[1:]), DTYPES[tensor.dtype])
    tensor.read_into(first, values)
    return values.astype(np.float32)


def _head(kernel: np.ndarray, bias: np.ndarray) -> Head:
    return {"output": {"kernel": kernel, "bias": bias}}
