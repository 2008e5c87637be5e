"""Loading of a Hugging Face directory: config.json and safetensors in, sharded arrays out. Export is the inverse.

Names, shapes and types are validated from the headers before any weight is read, and one error lists every problem.
Then each tensor is read once, directly to this process's devices that hold it (:mod:`.to_devices`). Published heads are
recognised by their tensors (:mod:`.published_heads`).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import heads
from cfprm_jax.huggingface.export import export
from cfprm_jax.huggingface.safetensors_files import DTYPES, Listing, StoredTensor, list_directory
from cfprm_jax.huggingface.to_devices import Conversion, load_param, place
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.parameters import (
    Params,
    ParamSpec,
    init_param,
    lookup,
    map_specs,
    map_tree,
    param_dtype,
    param_specs,
    walk,
)
from cfprm_jax.runtime.progress import counted

__all__ = ["LoadReport", "export", "head_of", "load_params", "no_such_directory", "read_config"]

# A process reward model has no use for these: the language-model head, and a buffer that old versions stored.
_IGNORED = re.compile(r"lm_head\.weight|.*\.rotary_emb\.inv_freq")
# Heads that are handed over beside the directory (see published_heads).
_OTHER_HEADS = re.compile(r"lm_head\.bias|v_head\..*")
# What a stored head with more than one label is here.
_LABELS = {1: "", 2: " (two labels, whose difference is its output)", 3: " (two labels, and one of redundant steps)"}
_LAYER = re.compile(r"(?<=\blayers\.)\d+(?=\.)")


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The report of a load, for the log.

    Attributes:
      head: "loaded" from the directory, or "fresh".
      labels: rows of the stored head's output (2: the parameter is their difference); 0 for a fresh head.
      ignored: tensors of the directory that a process reward model does not use.
      absent: biases that the directory's head does not have, which are 0.
      files: number of files of weights.
      stored_bytes: size of the tensors that were read.
    """

    head: str
    labels: int
    ignored: tuple[str, ...]
    absent: tuple[str, ...]
    files: int
    stored_bytes: int

    def __str__(self) -> str:
        head = "a fresh head" if self.head == "fresh" else f"the directory's head{_LABELS[self.labels]}"
        ignored = f"; not used: {', '.join(_compress(self.ignored))}" if self.ignored else ""
        absent = f"; no {', '.join(self.absent)}, which is 0" if self.absent else ""
        return f"{self.stored_bytes / 1e9:.2f} GB of weights in {counted(self.files, 'file')}, {head}{absent}{ignored}"


def no_such_directory(directory: str | pathlib.Path, expected: str = "a Hugging Face directory") -> UserError:
    """The error for a missing directory."""
    return UserError(f"{directory} is not a directory; expected {expected}")


def read_config(directory: str | pathlib.Path) -> tuple[BackboneConfig, dict[str, Any]]:
    """The backbone that directory/config.json describes, and the JSON object itself.

    Raises:
      UserError: naming the file and the key: missing, malformed, or not supported.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.parent.is_dir():
        raise no_such_directory(directory)
    if (path.parent / "checkpoints").is_dir():
        raise UserError(
            f"{directory} is a run of train, expected a Hugging Face directory: python -m cfprm_jax.export "
            f"--checkpoint={directory} writes one of its PRM"
        )
    if not path.exists():
        if (path.parent / "adapter_config.json").is_file():
            raise UserError(f"{path.parent}: holds adapters of PEFT alone; merge them into their backbone first")
        raise UserError(f"{path}: no such file; expected a Hugging Face directory")
    raw = read_object(path)
    try:
        return BackboneConfig.from_hf(raw), raw
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def head_of(directory: str | pathlib.Path) -> str | None:
    """The reward head that a directory holds: "linear", "mlp", or None. Reads headers, and a head of two layers.

    Raises:
      UserError: the directory holds no readable safetensors files.
    """
    tensors = {tensor.name: tensor for tensor in readable(pathlib.Path(directory)).tensors}
    return "linear" if heads.is_folded(tensors) else heads.kind_by_names(tensors)


def stored_dtype(directory: str | pathlib.Path) -> str:
    """The type to compute in that loses nothing of a directory's weights: "bfloat16" if all are, else "float32".

    The stored tensors decide, not config.json; heads do not count: that of a PRM is float32 in every model here.
    float16 has three more bits of mantissa than bfloat16.

    Raises:
      UserError: the directory holds no readable safetensors files.
    """
    tensors = readable(pathlib.Path(directory)).tensors
    heads_or_unused = re.compile(rf"score\..*|{_OTHER_HEADS.pattern}|{_IGNORED.pattern}")
    types = {tensor.dtype for tensor in tensors if not heads_or_unused.fullmatch(tensor.name)}
    return "bfloat16" if types == {"BF16"} else "float32"


def readable(directory: pathlib.Path) -> Listing:
    """The tensors of a directory, all of whose files are readable.

    Raises:
      UserError: one is not; with every problem of files and index.
    """
    if not directory.is_dir():
        raise no_such_directory(directory)
    listing = list_directory(directory)
    if listing.problems:
        raise _error(f"{directory}: the checkpoint is not usable", listing.problems)
    return listing


def load_params(
    directory: str | pathlib.Path,
    config: PRMConfig,
    *,
    shardings: Params | None = None,
    dtype: Any = jnp.float32,
    head_key: jax.Array | None = None,
    head: Params | None = None,
    conversions: Params | None = None,
    specs: Params | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """The parameters of a process reward model from a Hugging Face directory.

    A directory without a reward head (a language model) gets a fresh one; one with a head keeps it.

    Args:
      config: must have the directory's shapes (see read_config) and, if it has a head, that head (see head_of).
      shardings: nested dict of jax.sharding.Sharding of the parameters' structure; None leaves everything on the
        default device, uncommitted.
      dtype: float32 or bfloat16, the type of all parameters but the head, which is float32.
      head_key: jax.random key of a fresh head; None makes a directory without a head an error.
      head: float32 values of a linear head that the directory holds under other names (see published_heads).
      conversions: nested dict of the parameters' structure: what each of them becomes as it is loaded, which then
        stands in its place in the result.
      specs: nested dict of ParamSpec of the parameters to load, where these are a part of them; shardings and
        conversions have its structure, and so has the result. The whole directory is checked all the same.

    Raises:
      UserError: listing every tensor that is missing, unknown, held twice, of another shape or of another type, and
        every file that is missing or truncated; no weight of the backbone has been read by then.
    """
    directory = pathlib.Path(directory)
    listing = list_directory(directory)
    folded = config.head == "linear" and heads.is_folded({tensor.name: tensor for tensor in listing.tensors})
    as_stored = dataclasses.replace(config, head="mlp") if folded else config
    stored, ignored, absent = _checked(directory, as_stored, listing, head_key is not None, head is not None)

    def one(path: str, spec: ParamSpec) -> Any:
        sharding = None if shardings is None else lookup(shardings, path)
        conversion: Conversion | None = None if conversions is None else lookup(conversions, path)
        tensors = [stored.get(name) for name in spec.hf_names()]
        held = [tensor for tensor in tensors if tensor is not None]
        if held and spec.hf_form == "same":
            return load_param(spec, held, np.dtype(param_dtype(spec, dtype)), sharding, conversion)
        row = _head_row(spec, stored, folded)
        if row is not None:
            value = place(row, sharding)
        elif head is not None and path.startswith("head."):
            value = place(lookup(head, path.removeprefix("head.")), sharding)
        elif spec.hf_name in absent:
            value = place(np.zeros(spec.shape, np.float32), sharding)
        else:
            value = jax.jit(lambda key: init_param(path, spec, key, dtype), out_shardings=sharding)(head_key)
        return value if conversion is None else conversion(value)

    params = map_specs(one, config) if specs is None else map_tree(one, specs)
    outputs = [
        stored[spec.hf_name] for _, spec in walk(param_specs(as_stored)) if spec.hf_name in stored and _is_output(spec)
    ]
    report = LoadReport(
        head="loaded" if outputs or head is not None else "fresh",
        labels=outputs[0].shape[0] if outputs else int(head is not None),
        ignored=ignored,
        absent=absent,
        files=len({tensor.file for tensor in stored.values()}),
        stored_bytes=sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in stored.values()),
    )
    return params, report


def _head_row(spec: ParamSpec, stored: Mapping[str, StoredTensor], folded: bool) -> np.ndarray | None:
    """The value of an output of the head; None where the directory has none, so that it is a fresh one."""
    tensor = stored.get(spec.hf_name)
    if spec.hf_form == _THIRD:
        return heads.third_row(tensor) if tensor is not None and tensor.shape[0] == _LABELS_WITH_THIRD else None
    if folded:
        return heads.unfolded_row(stored[spec.hf_name.replace("score", "score.0")])
    return None if tensor is None else heads.output_row(tensor)


def _checked(
    directory: pathlib.Path, config: PRMConfig, listing: Listing, fresh_allowed: bool, head_given: bool
) -> tuple[dict[str, StoredTensor], tuple[str, ...], tuple[str, ...]]:
    """The tensor of each Hugging Face name of the specs, names that are ignored, and absent biases; or a UserError."""
    found: dict[str, list[StoredTensor]] = {}
    for tensor in listing.tensors:
        found.setdefault(tensor.name, []).append(tensor)
    # Classes without a head (Qwen2Model) save without the prefix under which every other class keeps the backbone.
    bare = "embed_tokens.weight" in found and "model.embed_tokens.weight" not in found
    specs: dict[str, ParamSpec] = {}
    for _, spec in walk(param_specs(config)):
        if spec.hf_form != _THIRD:
            specs |= dict.fromkeys(spec.hf_names(), spec)

    problems: list[tuple[str, str]] = []  # (tensor, what is wrong with it)
    head = heads.kind_by_names(set(found) | listing.lost)
    if head is not None and head != config.head:
        problems.append(("score", f"a head of kind {head}; expected {config.head}"))
    all_lost = listing.unreadable and not listing.lost
    # A linear head may do without a bias (torch.nn.Linear with bias=False, as reward models are trained).
    bare_head = head == "linear" and "score.weight" in found and "score.bias" not in found.keys() | listing.lost
    absent = ("score.bias",) if bare_head and not all_lost else ()
    # Tensors that an earlier problem explains are not reported again one by one.
    head_settled = fresh_allowed or head_given if head is None else head != config.head
    stored: dict[str, StoredTensor] = {}
    expected: set[str] = set()
    for name, spec in specs.items():
        is_head = name.startswith("score.")
        actual = name.removeprefix("model.") if bare else name
        expected.add(actual)
        if actual in found:
            stored[name] = found[actual][0]
            problems += [(actual, text) for text in _tensor_problems(found[actual], spec, config.redundancy)]
        elif not (actual in listing.lost or all_lost or actual in absent or (is_head and head_settled)):
            reason = " (the directory has no reward head)" if is_head and head is None else ""
            problems.append((actual, f"missing{reason}"))
    shapes = [stored[name].shape for name, spec in specs.items() if _is_output(spec) and name in stored]
    outputs = {shape[0] for shape in shapes if shape}
    if len(outputs) > 1 and outputs <= {1, 2, _LABELS_WITH_THIRD}:
        numbers = " or ".join(map(str, sorted(outputs)))
        problems.append(("score", f"weight and bias disagree on the number of labels, {numbers}"))
    if config.redundancy and outputs and _LABELS_WITH_THIRD not in outputs and not fresh_allowed:
        problems.append(("score", "no third label, which is the redundancy output"))
    ignored = [name for name in found if _IGNORED.fullmatch(name) or (head_given and _OTHER_HEADS.fullmatch(name))]
    for name in found.keys() - expected - set(ignored):
        if not (name.startswith("score.") and head_settled):
            problems.append((name, f"unknown (in {', '.join(tensor.file.name for tensor in found[name])})"))
    lines = [*listing.problems, *_compress_problems(sorted(problems))]
    if lines:
        raise _error(f"{directory}: the checkpoint does not fit this model", lines)
    return stored, tuple(ignored), absent


def _error(head: str, problems: Sequence[str]) -> UserError:
    """All problems in one error: a single one on the line that names the directory, several on lines below it."""
    return UserError(f"{head}: {problems[0]}" if len(problems) == 1 else "\n  ".join([f"{head}:", *problems]))


# The hf_form of a redundancy output, and the labels of a tensor that holds one.
_THIRD, _LABELS_WITH_THIRD = "third_class", 3


def _is_output(spec: ParamSpec) -> bool:
    return spec.hf_form == "class_difference"


def _tensor_problems(held: list[StoredTensor], spec: ParamSpec, redundancy: bool) -> list[str]:
    problems = []
    if len(held) > 1:
        problems.append(f"held twice, by {' and '.join(tensor.file.name for tensor in held)}")
    shape = spec.shape[1:] if spec.stacked else spec.shape
    rows = (1, 2, _LABELS_WITH_THIRD) if redundancy else (1, 2)
    allowed = [(n, *shape[1:]) for n in rows] if _is_output(spec) else [shape]
    for tensor in held:
        if tensor.shape not in allowed:
            expected = " or ".join(str(list(s)) for s in allowed)
            problems.append(f"shape {list(tensor.shape)}, expected {expected} (in {tensor.file.name})")
        if tensor.dtype not in DTYPES:
            problems.append(f"type {tensor.dtype}, expected one of {', '.join(DTYPES)} (in {tensor.file.name})")
    return problems


def _compress_problems(problems: list[tuple[str, str]]) -> list[str]:
    """One line for each problem, or for the same problem in the same tensor of several layers."""
    groups: dict[str, list[str]] = {}
    for name, text in problems:
        groups.setdefault(text, []).append(name)
    return [f"{name}: {text}" for text, names in groups.items() for name in _compress(names)]


def _compress(names: list[str] | tuple[str, ...]) -> list[str]:
    """model.layers.0.x, model.layers.1.x, model.layers.2.x -> model.layers.[0-2].x; every layer stays named."""
    groups: dict[str, list[int]] = {}
    for name in names:
        match = _LAYER.search(name)
        template = name if match is None else name[: match.start()] + "{}" + name[match.end() :]
        groups.setdefault(template, []).extend([] if match is None else [int(match[0])])
    out = []
    for template, layers in groups.items():
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and layer == runs[-1][1] + 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)
        out.append(template.replace("{}", text if len(layers) == 1 else f"[{text}]"))
    return out
