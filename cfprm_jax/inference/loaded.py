"""A trained PRM of a run directory, or its adapters alone: parameters, network, tokenizer and encoding."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import transformers
from jax.sharding import Mesh

from cfprm_jax.checkpoints import adapters, checksums, orbax_files, saving, stored_params
from cfprm_jax.checkpoints.model_files import MODEL, check_model
from cfprm_jax.checkpoints.prm_file import PRM_FILE, read_prm
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.compute_dtype import compute_dtype
from cfprm_jax.models import lora
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import abstract_params, abstract_tree, param_specs
from cfprm_jax.sharding import rules

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class LoadedPRM:
    """A trained PRM, ready to score."""

    config: PRMConfig
    params: Any
    tokenizer: transformers.PreTrainedTokenizerBase
    encoding: EncodingConfig
    meta: dict[str, Any]  # prm.json: loss, granularities, ...; and "step"
    encoding_name: str = "cfprm"  # one of config.ENCODINGS


def warn(line: str) -> None:
    """A line for whoever calls this from Python: a UserWarning."""
    warnings.warn(line, UserWarning, stacklevel=2)


def load_for_inference(
    path: str | pathlib.Path,
    dtype: str = "auto",
    attention: str = "auto",
    mesh: Mesh | None = None,
    say: Say = warn,
) -> LoadedPRM:
    """The PRM of a run directory or of one of its checkpoints. Of the state only the parameters are read.

    They are compared with their checksums. A checkpoint that is named must be whole; of a run directory, the newest
    one that is whole is taken, and said so if newer ones are damaged.

    Args:
      path: a run directory (its newest checkpoint) or checkpoints/STEP in one.
      dtype: type that the network computes in, and of its weights; the reward head's stay float32, as its output does.
        "auto" is the type that the run computed in.
      attention: attention backend.
      mesh: where the parameters go; by default one device.
      say: takes a line about a checkpoint that is damaged and passed over, or of an earlier version.

    Raises:
      UserError: no checkpoint there, or model/ is not what the run wrote.
      DamagedError: none is whole.
    """
    run, steps = saving.candidates(path)
    model = run / MODEL
    check_model(model)
    meta, encoding = read_prm(model)
    if encoding is None:
        raise UserError(f"{model} has no {PRM_FILE}, which train writes there")
    backbone, _ = loading.read_config(model)
    dtype = compute_dtype(dtype, meta)
    mesh = mesh or rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    backend = rules.attention_backend(attention, mesh, backbone, dtype)
    config = PRMConfig(backbone, meta["head"], dtype, backend, "none", meta.get("redundancy", False))
    if "lora" in meta:
        specs = lora.trainable_specs(config, adapters.from_record(meta["lora"]))
        abstract = abstract_tree(specs, shardings=rules.param_shardings(mesh, specs))
        trainable, step = _read_params(run, steps, abstract, say)
        params = adapters.merged(meta["lora"], trainable, config, dtype, mesh)
    else:
        shardings = rules.param_shardings(mesh, param_specs(config))
        params, step = _read_params(run, steps, abstract_params(config, dtype, shardings), say)
    return LoadedPRM(
        config=config,
        params=params,
        tokenizer=load_tokenizer(model, encoding.marker, backbone.vocab_size),
        encoding=encoding,
        meta={**meta, "step": step},
    )


@dataclasses.dataclass(frozen=True)
class LoadedAdapters:
    """What a run with adapters has trained, not merged into its backbone."""

    config: PRMConfig
    adapters: Lora
    backbone: pathlib.Path
    trainable: Any
    step: int
    tokenizer: transformers.PreTrainedTokenizerBase
    encoding: EncodingConfig


def load_adapters(path: str | pathlib.Path, say: Say = warn) -> LoadedAdapters:
    """Float32 adapters and head of a run directory or of one of its checkpoints, on one device.

    The checkpoint is chosen and checked as in :func:`load_for_inference`.

    Raises:
      UserError: no checkpoint there, one without adapters, or a backbone that is not where it was or is another.
    """
    run, steps = saving.candidates(path)
    check_model(run / MODEL)
    meta, encoding = read_prm(run / MODEL)
    if encoding is None or "lora" not in meta:
        raise UserError(f"{run} is no run with adapters (train --lora_rank): it has the whole model only")
    backbone, _ = loading.read_config(run / MODEL)
    config = PRMConfig(backbone, meta["head"], redundancy=meta.get("redundancy", False))
    own = adapters.from_record(meta["lora"])
    specs = lora.trainable_specs(config, own)
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    abstract = abstract_tree(specs, shardings=rules.param_shardings(mesh, specs))
    trainable, step = _read_params(run, steps, abstract, say)
    return LoadedAdapters(
        config=config,
        adapters=own,
        backbone=adapters.backbone_directory(meta["lora"]),
        trainable=trainable,
        step=step,
        tokenizer=load_tokenizer(run / MODEL, encoding.marker, backbone.vocab_size),
        encoding=encoding,
    )


def _read_params(run: pathlib.Path, steps: Sequence[int], params: Any, say: Say) -> tuple[Any, int]:
    """(Parameters laid out as the abstract ones, step) of the first of the steps whose checkpoint is whole.

    Raises:
      DamagedError: none is; with why each is not.
    """
    faults = []
    for step in steps:
        at = run / CHECKPOINTS / str(step)
        try:
            meta = orbax_files.read_json(at, "meta")
            found = stored_params.read(at, params, functools.partial(checksums.verify, at, meta=meta))
        except orbax_files.DamagedError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            say(f"{fault}; {at} is used instead")
        if note := checksums.note(at, meta):
            say(note)
        return found, step
    raise orbax_files.DamagedError("; ".join(faults))
