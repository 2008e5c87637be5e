"""Parameters to a Hugging Face directory for transformers or vLLM: config.json, safetensors, tokenizer, prm.json.

A piece of a tensor at a time goes from the devices through the host into the file, so no second copy of the model ever
exists (:mod:`.fetching`).
Everything is written into a hidden directory beside the target, which is renamed when it is complete: a directory of
the target's name is whole or is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.from_devices import pieces, whole
from cfprm_jax.huggingface.safetensors_files import DTYPES, PlannedTensor, write_shards
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import Params, ParamSpec, lookup, param_specs, walk
from cfprm_jax.runtime import atomic, output_paths

EXPORT_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
# "At most 5 GB a file", in the decimal gigabytes that hubs count in.
MAX_SHARD_BYTES = 5 * 10**9
_CLASSES = ("incorrect", "correct")
_REDUNDANT = "redundant"


@dataclasses.dataclass(frozen=True)
class Format:
    """The layout of an export.

    Attributes:
      architecture: class in config.json, after the name of the family (families.Family.classes).
      labels: meaning of the logits of a token. Two: (0, z), whose softmax is (1 - sigmoid(z), sigmoid(z)). One: z.
      layers: 1 for `score`, 2 for `score.0`, ReLU, `score.2`.
    """

    architecture: str
    labels: tuple[str, ...]
    layers: int

    def class_name(self, backbone: BackboneConfig) -> str:
        """The class of an export of this backbone, such as LlamaForTokenClassification."""
        return backbone.family.classes + self.architecture

    def holds(self, config: PRMConfig) -> bool:
        """Whether there is such a class for the backbone's family, and it can hold the head."""
        # A class with two layers is vLLM's, which has them for some families.
        return config.backbone.family.reward_classes if self.layers == 2 else config.head == "linear"


FORMATS = {
    "token_classification": Format("ForTokenClassification", _CLASSES, layers=1),
    "process_reward_model": Format("ForProcessRewardModel", _CLASSES, layers=2),
    "reward_model": Format("ForRewardModel", ("reward",), layers=2),
}
# Not a whole model: adapters for a token_classification model; see :mod:`cfprm_jax.huggingface.peft`.
PEFT_ADAPTER = "peft_adapter"


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The result of an export: names of the weight files, number of parameters, and their bytes."""

    files: tuple[str, ...]
    parameters: int
    stored_bytes: int

    @classmethod
    def of(cls, files: Sequence[str], tensors: Sequence[PlannedTensor], stored: str) -> ExportReport:
        """The report of tensors written in a stored type such as "BF16"."""
        parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        return cls(tuple(files), parameters, parameters * DTYPES[stored].itemsize)


def export(
    directory: str | pathlib.Path,
    params: Params,
    config: PRMConfig,
    tokenizer: Any,
    encoding: EncodingConfig,
    *,
    format: str = "token_classification",
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    texts: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write a PRM as a Hugging Face directory.

    token_classification is transformers' class of the backbone's family, such as LlamaForTokenClassification, with two
    labels. The rows of score.weight are (0, w) and those of score.bias (0, b), so that softmax(logits)[..., 1] =
    sigmoid(z) exactly. A redundancy output is a third label, whose row is that of its own logit u: the score is then
    softmax(logits[..., :2])[..., 1], and the redundancy sigmoid(logits[..., 2]).

    process_reward_model and reward_model are the classes of Qwen2.5-Math-PRM and -RM, of Qwen2 alone, with two labels
    and with one: Linear, ReLU, Linear. An mlp head is that. A linear head becomes z = relu(wx + b) - relu(-(wx + b)):
    rows w and -w of the first layer, 1 and -1 in the second, 0 elsewhere. One of the two is 0 and the other |z|, and
    products with 0, 1 and -1 are exact, so nothing is rounded that `score` alone would not round.

    config.json keeps every field of the backbone's own, but for auto_map, which names code that is not there. prm.json
    holds the kind of the head and the encoding options, without which texts cannot be scored as in training.
    generation_config.json names the tokens that begin, end and pad a text.

    Args:
      directory: is created, and must be empty if it is there.
      params: of the structure of param_specs(config), in any sharding over devices of this process alone.
      tokenizer: what load_tokenizer gave; its marker is the token whose labels are scores.
      dtype: "bfloat16" or "float32", of every tensor written.
      max_shard_bytes: most bytes of tensors in one file.
      progress: called with (bytes written, total bytes) after each piece of a tensor.
      texts: more files of the directory, such as README.md, by name; one that is written here anyway is replaced.

    Raises:
      UserError: the directory is not empty, or the format or dtype is unknown, or the format cannot hold this head, or
        this is one of several processes.
    """
    directory = pathlib.Path(directory)
    check_export(directory, config, format, dtype)
    form, stored = FORMATS[format], EXPORT_DTYPES[dtype]
    tensors = list(_plan(params, config, form, stored))
    raw = _config_json(config, form, dtype)
    described = {"config.json": raw, "generation_config.json": _generation_config(raw)}
    with new_directory(directory, config, tokenizer, encoding, described=described, texts=texts or {}) as partial:
        files = write_shards(partial, tensors, stored, max_shard_bytes, counter(tensors, stored, progress))
    return ExportReport.of(files, tensors, stored)


@contextlib.contextmanager
def new_directory(
    directory: pathlib.Path,
    config: PRMConfig,
    tokenizer: Any,
    encoding: EncodingConfig,
    *,
    described: Mapping[str, Any],
    texts: Mapping[str, str],
) -> Iterator[pathlib.Path]:
    """A directory for weights that takes its name when they and all that goes with them are in it, or is removed.

    Args:
      described: JSON objects by the names of their files.
      texts: files by name, which replace those.
    """
    # Imported here: loading weights alone needs no tokenizer library.
    from cfprm_jax.model_directory.reserved_tokens import RENAMED_FROM
    from cfprm_jax.model_directory.tokenizer_files import marker_origin, save_tokenizer

    with atomic.new_directory(directory) as partial:
        yield partial
        prm: dict[str, Any] = {"head": config.head, "encoding": dataclasses.asdict(encoding)}
        if config.redundancy:
            prm["redundancy"] = True
        if (origin := marker_origin(tokenizer)) is not None:
            prm[RENAMED_FROM] = origin
        for name, value in {**described, "prm.json": prm}.items():
            atomic.write_json(partial / name, value)
        save_tokenizer(tokenizer, partial)
        for name, text in texts.items():
            atomic.write_text(partial / name, text)


def counter(
    tensors: Sequence[PlannedTensor], stored: str, progress: Callable[[int, int], None] | None
) -> Callable[[int], None] | None:
    """A callback that takes the bytes of each piece and calls progress with (bytes written, total bytes)."""
    if progress is None:
        return None
    done, total = 0, ExportReport.of([], tensors, stored).stored_bytes

    def written(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return written


def check_export(directory: pathlib.Path, config: PRMConfig, format: str, dtype: str) -> None:
    """Raise the UserError that export would, before anything has been loaded for it."""
    if jax.process_count() > 1:
        raise UserError(
            f"export runs as one process, and this is one of {jax.process_count()}: start it once, outside the launcher"
            " of the training; a checkpoint that several processes wrote is read by one"
        )
    formats = {**FORMATS, PEFT_ADAPTER: FORMATS["token_classification"]}
    if format not in formats:
        raise UserError(f"--format: {format!r} is not among: {', '.join(formats)}")
    if dtype not in EXPORT_DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not among: {', '.join(EXPORT_DTYPES)}")
    if not formats[format].holds(config):
        able = " or ".join(name for name, form in FORMATS.items() if form.holds(config))
        what = "no other format holds it" if not able else f"name {able}"
        if formats[format].layers == 1:
            why = f"holds a linear head only, and this model's head is {config.head!r}"
        else:
            why = f"is a class for model_type 'qwen2', and this model's is {config.backbone.model_type!r}"
        raise UserError(f"--format={format} {why}: {what}")
    if config.redundancy and formats[format].layers != 1:
        raise UserError(
            f"--format={format} has no room for the redundancy output: name token_classification or {PEFT_ADAPTER} (of "
            "a linear head), or leave it out by --drop_redundancy"
        )
    output_paths.require_new_directory("--output_dir", directory)


def _generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The part of generation_config.json that a model without generation keeps."""
    return {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}


def _config_json(config: PRMConfig, form: Format, dtype: str) -> dict[str, Any]:
    raw = config.backbone.to_hf()
    raw.pop("auto_map", None)
    labels = (*form.labels, _REDUNDANT) if config.redundancy else form.labels
    return {
        **raw,
        "architectures": [form.class_name(config.backbone)],
        "num_labels": len(labels),
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
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

    def planned(path: str, spec: ParamSpec) -> PlannedTensor:
        return PlannedTensor(spec.hf_name, spec.shape, functools.partial(pieces, lookup(params, path), dtype))

    for path, spec in first:
        yield planned(path, spec)
    for layer in range(config.backbone.num_hidden_layers):
        for path, spec in layered:
            rows = functools.partial(pieces, lookup(params, path), dtype, layer)
            yield PlannedTensor(spec.hf_name.format(layer=layer), spec.shape[1:], rows)
    for path, spec in last:
        yield planned(path, spec)
    yield from plan_head(params["head"], config, form, dtype)


def plan_head(head: Params, config: PRMConfig, form: Format, dtype: np.dtype) -> Iterator[PlannedTensor]:
    """The tensors of the reward head, `score` and on."""
    width, labels = config.backbone.hidden_size, len(form.labels)
    kernel, bias = (whole(head["output"][name], dtype) for name in ("kernel", "bias"))

    def planned(name: str, values: np.ndarray) -> PlannedTensor:
        return PlannedTensor(name, values.shape, lambda: [values])

    def labelled(positive: np.ndarray) -> np.ndarray:
        """The row of z, after a row of zeros for the negative class if there are two labels."""
        return positive if labels == 1 else np.concatenate([np.zeros_like(positive), positive])

    def with_third(rows: np.ndarray, name: str) -> np.ndarray:
        """The rows, and that of redundancy if there is one."""
        return np.concatenate([rows, whole(head["redundancy"][name], dtype)]) if config.redundancy else rows

    def pair(positive: np.ndarray) -> Iterator[np.ndarray]:
        """w and -w, then zeros up to the width."""
        yield np.concatenate([positive, -positive])
        yield np.zeros((width - 2, *positive.shape[1:]), dtype)

    if form.layers == 2 and config.head == "linear":
        yield PlannedTensor("score.0.weight", (width, width), functools.partial(pair, kernel))
        yield PlannedTensor("score.0.bias", (width,), functools.partial(pair, bias))
        kernel, bias = np.zeros((1, width), dtype), np.zeros(1, dtype)
        kernel[0, :2] = 1, -1
    elif form.layers == 2:
        yield planned("score.0.weight", whole(head["hidden"]["kernel"], dtype))
        yield planned("score.0.bias", whole(head["hidden"]["bias"], dtype))
    name = "score" if form.layers == 1 else "score.2"
    yield planned(f"{name}.weight", with_third(labelled(kernel), "kernel"))
    yield planned(f"{name}.bias", with_third(labelled(bias), "bias"))
