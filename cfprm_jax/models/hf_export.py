"""Parameters to a Hugging Face directory for transformers or vLLM: config.json, safetensors, tokenizer, prm.json.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import Params, ParamSpec, lookup, param_specs, walk
from cfprm_jax.models.safetensors_files import DTYPES, PlannedTensor, write_shards

EXPORT_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
# "At most 5 GB a file", in the decimal gigabytes that hubs count in.
MAX_SHARD_BYTES = 5 * 10**9
_CLASSES = ("incorrect", "correct")


@dataclasses.dataclass(frozen=True)
class Format:
    """What an export looks like.

    Attributes:
      architecture: class in config.json.
      labels: what the logits of a token stand for. Two: (0, z), whose softmax is (1 - sigmoid(z), sigmoid(z)). One: z.
      layers: 1 for `score`, 2 for `score.0`, ReLU, `score.2`.
    """

    architecture: str
    labels: tuple[str, ...]
    layers: int


FORMATS = {
    "token_classification": Format("Qwen2ForTokenClassification", _CLASSES, layers=1),
    "process_reward_model": Format("Qwen2ForProcessRewardModel", _CLASSES, layers=2),
    "reward_model": Format("Qwen2ForRewardModel", ("reward",), layers=2),
}


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
    texts: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write a PRM as a Hugging Face directory.

    token_classification is transformers' Qwen2ForTokenClassification with two labels. The rows of score.weight are
    (0, w) and those of score.bias (0, b), so that softmax(logits)[..., 1] = sigmoid(z) exactly.

    process_reward_model and reward_model are the classes of Qwen2.5-Math-PRM and -RM, with two labels and with one:
    Linear, ReLU, Linear. An mlp head is that. A linear head becomes z = relu(wx + b) - relu(-(wx + b)): rows w and -w
    of the first layer, 1 and -1 in the second, 0 elsewhere. One of the two is 0 and the other |z|, and products with
    0, 1 and -1 are exact, so nothing is rounded that `score` alone would not round.

    config.json keeps every field of the backbone's own, but for auto_map, which names code that is not there. prm.json
    holds the kind of the head as it is written and the encoding options, without which texts cannot be scored as in
    training. generation_config.json names the tokens that begin, end and pad a text.

    Args:
      directory: is created, and must be empty if it is there.
      params: of the structure of param_specs(config), on any devices of this process.
      tokenizer: what load_tokenizer gave; its marker is the token whose labels are scores.
      dtype: "bfloat16" or "float32", of every tensor written.
      max_shard_bytes: most bytes of tensors in one file.
      progress: told (bytes written, bytes in all) after each tensor.
      texts: more files of the directory, such as README.md, by name; one that is written here anyway is replaced.

    Raises:
      UserError: the directory is not empty, or the format or dtype is unknown, or the format cannot hold this head.
    """
    # Imported here: whoever only loads weights does not need a tokenizer library.
    from cfprm_jax.data.encoding import save_tokenizer

    directory = pathlib.Path(directory)
    check_export(directory, config, format, dtype)
    form = FORMATS[format]
    tensors = list(_plan(params, config, form, EXPORT_DTYPES[dtype]))
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
        raw = _config_json(config, form, dtype)
        _write_json(partial / "config.json", raw)
        _write_json(partial / "generation_config.json", _generation_config(raw))
        head = "linear" if form.layers == 1 else "mlp"
        _write_json(partial / "prm.json", {"head": head, "encoding": dataclasses.asdict(encoding)})
        save_tokenizer(tokenizer, partial)
        for name, text in (texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
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
    if FORMATS[format].layers == 1 and config.head != "linear":
        able = " or ".join(name for name, form in FORMATS.items() if form.layers == 2)
        raise UserError(
            f"--format={format} holds a linear head only, and this model's head is {config.head!r}: name {able}"
        )
    check_output_dir(directory)


def check_output_dir(directory: pathlib.Path) -> None:
    """Raise UserError unless the directory is empty or not there."""
    if directory.is_dir():
        if any(directory.iterdir()):
            raise UserError(f"--output_dir={directory} is not empty; choose a new directory")
    elif directory.exists():
        raise UserError(f"--output_dir={directory} is a file")


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What remains of it for a model that generates nothing."""
    return {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}


def _config_json(config: PRMConfig, form: Format, dtype: str) -> dict[str, Any]:
    raw = config.backbone.to_hf()
    raw.pop("auto_map", None)
    return {
        **raw,
        "architectures": [form.architecture],
        "num_labels": len(form.labels),
        "id2label": {str(i): label for i, label in enumerate(form.labels)},
        "label2id": {label: i for i, label in enumerate(form.labels)},
        "dtype": dtype,
        "torch_dtype": dtype,  # the name that transformers 4 and vLLM read
    }


def _plan(params: Params, config: PRMConfig, form: Format, stored: str) -> Iterator[PlannedTensor]:
    """Every tensor in the order of the network, so that a layer's tensors lie together."""
    dtype = DTYPES[stored]
    specs = list(walk(param_specs(config)["backbone"], "backbone."))
    layered = [(path, spec) for path, spec in specs if spec.stacked]
    first = [(path, spec) for path, spec in specs if spec.kind == "embedding"]
    last = [(path, spec) for path, spec in specs if not spec.stacked and spec.kind != "embedding"]

    def whole(path: str, spec: ParamSpec) -> PlannedTensor:
        return PlannedTensor(spec.hf_name, spec.shape, functools.partial(_fetch, lookup(params, path), dtype))

    for path, spec in first:
        yield whole(path, spec)
    for layer in range(config.backbone.num_hidden_layers):
        for path, spec in layered:
            fetch = functools.partial(_fetch_layer, lookup(params, path), layer, dtype)
            yield PlannedTensor(spec.hf_name.format(layer=layer), spec.shape[1:], fetch)
    for path, spec in last:
        yield whole(path, spec)
    yield from _plan_head(params["head"], config, form, dtype)


def _plan_head(head: Params, config: PRMConfig, form: Format, dtype: np.dtype) -> Iterator[PlannedTensor]:
    width, labels = config.backbone.hidden_size, len(form.labels)
    kernel, bias = head["output"]["kernel"], head["output"]["bias"]

    def planned(name: str, shape: tuple[int, ...], function: Callable[..., np.ndarray], *args: Any) -> PlannedTensor:
        return PlannedTensor(name, shape, functools.partial(function, *args, dtype))

    if form.layers == 2 and config.head == "linear":
        signs = np.zeros((1, width), np.float32)
        signs[0, :2] = 1, -1
        yield planned("score.0.weight", (width, width), _fetch_pair, kernel, width)
        yield planned("score.0.bias", (width,), _fetch_pair, bias, width)
        kernel, bias = jnp.asarray(signs), jnp.zeros(1)
    elif form.layers == 2:
        yield planned("score.0.weight", (width, width), _fetch, head["hidden"]["kernel"])
        yield planned("score.0.bias", (width,), _fetch, head["hidden"]["bias"])
    name = "score" if form.layers == 1 else "score.2"
    yield planned(f"{name}.weight", (labels, width), _fetch_labels, kernel, labels)
    yield planned(f"{name}.bias", (labels,), _fetch_labels, bias, labels)


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


def _fetch_pair(leaf: jax.Array, size: int, dtype: np.dtype) -> np.ndarray:
    """w and -w, then zeros up to so many rows."""
    positive = _fetch(leaf, dtype)
    return np.concatenate([positive, -positive, np.zeros((size - 2, *positive.shape[1:]), dtype)])


def _fetch_labels(leaf: jax.Array, labels: int, dtype: np.dtype) -> np.ndarray:
    """The row of z, after a row of zeros for the negative class if there are two labels."""
    positive = _fetch(leaf, dtype)
    return positive if labels == 1 else np.concatenate([np.zeros_like(positive), positive])
