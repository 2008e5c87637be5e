"""Parameters to a Hugging Face directory that transformers loads: config.json, safetensors, tokenizer, prm.json.

One tensor at a time goes from the devices through the host into the file, so no second copy of the model ever exists.
Everything is written into a hidden directory beside the target, which is renamed when it is complete: a directory of
the target's name is whole or is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params, lookup, param_specs, walk
from cfprm_jax.models.safetensors_files import DTYPES, PlannedTensor, write_shards

FORMATS = ("token_classification",)
EXPORT_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
# "At most 5 GB a file", in the decimal gigabytes that hubs count in.
MAX_SHARD_BYTES = 5 * 10**9
LABELS = ("incorrect", "correct")


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What an export wrote: the names of the files of weights, the number of parameters and of bytes in them."""

    files: tuple[str, ...]
    parameters: int
    stored_bytes: int


def export(
    directory: str | pathlib.Path,
    params: Params,
    config: PRMConfig,
    tokenizer: Any,
    encoding: EncodingConfig,
    format: str = "token_classification",
    dtype: str = "bfloat16",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a PRM as a Hugging Face directory.

    token_classification is transformers' Qwen2ForTokenClassification with two labels. The rows of score.weight are
    (0, w) and those of score.bias (0, b), so that softmax(logits)[..., 1] = sigmoid(z) exactly.

    config.json keeps every field of the backbone's own, but for auto_map, which names code that belongs to another
    class. prm.json holds the head's kind and the encoding options, without which texts cannot be scored as in training.

    Args:
      directory: is created, and must be empty if it is there.
      params: of the structure of param_specs(config), on any devices of this process.
      tokenizer: what load_tokenizer gave; its marker is the token whose labels are scores.
      dtype: "bfloat16" or "float32", of every tensor written.
      max_shard_bytes: most bytes of tensors in one file.
      progress: told (bytes written, bytes in all) after each tensor.

    Raises:
      UserError: the directory is not empty, or the format or dtype is unknown, or the format cannot hold this head.
    """
    # Imported here: whoever only loads weights does not need a tokenizer library.
    from cfprm_jax.data.encoding import save_tokenizer

    directory = pathlib.Path(directory)
    check_export(directory, config, format, dtype)
    tensors = list(_plan(params, config, EXPORT_DTYPES[dtype]))
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    total = parameters * DTYPES[EXPORT_DTYPES[dtype]].itemsize
    done = 0

    def written(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    partial = directory.absolute().parent / f".{directory.absolute().name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        files = write_shards(partial, tensors, EXPORT_DTYPES[dtype], max_shard_bytes, written)
        _write_json(partial / "config.json", _config_json(config, dtype))
        _write_json(partial / "prm.json", {"head": config.head, "encoding": dataclasses.asdict(encoding)})
        save_tokenizer(tokenizer, partial)
        partial.rename(directory.absolute())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return ExportReport(tuple(files), parameters, total)


def check_export(directory: pathlib.Path, config: PRMConfig, format: str, dtype: str) -> None:
    """Raise the UserError that export would, before anything has been loaded for it."""
    if format not in FORMATS:
        raise UserError(f"--format: {format!r} is not among: {', '.join(FORMATS)}")
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not among: {', '.join(EXPORT_DTYPES)}")
    if config.head != "linear":
        raise UserError(f"--format={format} holds a linear head only, and this model's head is {config.head!r}")
    check_output_dir(directory)


def check_output_dir(directory: pathlib.Path) -> None:
    """Raise UserError unless the directory is empty or not there."""
    if directory.is_dir():
        if any(directory.iterdir()):
            raise UserError(f"--output_dir={directory} is not empty; choose a new directory")
    elif directory.exists():
        raise UserError(f"--output_dir={directory} is a file")


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _config_json(config: PRMConfig, dtype: str) -> dict[str, Any]:
    raw = config.backbone.to_hf()
    raw.pop("auto_map", None)
    return {
        **raw,
        "architectures": ["Qwen2ForTokenClassification"],
        "num_labels": len(LABELS),
        "id2label": {str(i): label for i, label in enumerate(LABELS)},
        "label2id": {label: i for i, label in enumerate(LABELS)},
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 and vLLM read
    }


def _plan(params: Params, config: PRMConfig, stored: str) -> Iterator[PlannedTensor]:
    """Every tensor in the order of the network, so that a layer's tensors lie together."""
    dtype = DTYPES[stored]
    specs = list(walk(param_specs(config)))
    layered = [(path, spec) for path, spec in specs if spec.stacked]
    first = [(path, spec) for path, spec in specs if spec.kind == "embedding"]
    last = [(path, spec) for path, spec in specs if not spec.stacked and spec.kind != "embedding"]
    for path, spec in first:
        yield PlannedTensor(spec.hf_name, spec.shape, functools.partial(_fetch, lookup(params, path), dtype))
    for layer in range(config.backbone.num_hidden_layers):
        for path, spec in layered:
            fetch = functools.partial(_fetch_layer, lookup(params, path), layer, dtype)
            yield PlannedTensor(spec.hf_name.format(layer=layer), spec.shape[1:], fetch)
    for path, spec in last:
        leaf = lookup(params, path)
        if spec.hf_form == "class_difference":
            shape = (2, *spec.shape[1:])
            yield PlannedTensor(spec.hf_name, shape, functools.partial(_fetch_classes, leaf, dtype))
        else:
            yield PlannedTensor(spec.hf_name, spec.shape, functools.partial(_fetch, leaf, dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf.astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast_layer(leaf: jax.Array, layer: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False).astype(dtype)


def _fetch(leaf: jax.Array, dtype: np.dtype) -> np.ndarray:
    return np.asarray(_cast(leaf, dtype))


def _fetch_layer(leaf: jax.Array, layer: int, dtype: np.dtype) -> np.ndarray:
    # Sliced and cast on the device: fetching the stacked parameter whole would be a second copy of most of the model.
    return np.asarray(_cast_layer(leaf, jnp.int32(layer), dtype))


def _fetch_classes(leaf: jax.Array, dtype: np.dtype) -> np.ndarray:
    positive = _fetch(leaf, dtype)
    return np.concatenate([np.zeros_like(positive), positive])
