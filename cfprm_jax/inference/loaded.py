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

from cfprm_jax.checkpoints import checksums, frozen, orbax_files, saving, stored_params
from cfprm_jax.checkpoints.model_files import MODEL, check_model
from cfprm_jax.checkpoints.prm_file import PRM_FILE, read_prm
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.config import DeviceConfig, EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.compute_dtype import compute_dtype
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import Lora
from cfprm_jax.models.parameters import abstract_tree
from cfprm_jax.models.partition import Partition
from cfprm_jax.sharding import rules

Log = Callable[[str], None]


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
    """Issues a message as a UserWarning, the default for Python callers."""
    warnings.warn(line, UserWarning, stacklevel=2)


def load_for_inference(
    path: str | pathlib.Path,
    dtype: str = "auto",
    attention: str = "auto",
    mesh: Mesh | None = None,
    log: Log = warn,
) -> LoadedPRM:
    """Loads the PRM of a run directory or of one of its checkpoints. Reads the parameters of the state only.

    Parameters are verified against their checksums. Of a run directory, the newest undamaged checkpoint is loaded. A
    checkpoint given by its own path must be undamaged.

    Args:
      path: a run directory (its newest checkpoint) or checkpoints/STEP in one.
      dtype: dtype of the weights and the computation; the reward head and its output are float32. "auto" is the dtype
        of the training run.
      attention: attention backend.
      mesh: mesh of the parameters; by default a single device.
      log: called with a message if a damaged checkpoint is skipped, or if a checkpoint is of an earlier version.

    Raises:
      UserError: there is no checkpoint, or model/ was modified.
      DamagedError: all checkpoints are damaged.
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
    partition = frozen.partition_of(meta, config)
    specs = partition.trainable
    own = dtype if partition.lora is None else "float32"
    abstract = abstract_tree(specs, own, rules.param_shardings(mesh, specs))
    trainable, step = _read_params(run, steps, abstract, log)
    return LoadedPRM(
        config=config,
        params=frozen.whole(meta, trainable, config, dtype, mesh),
        tokenizer=load_tokenizer(model, encoding.marker, backbone.vocab_size),
        encoding=encoding,
        meta={**meta, "step": step},
    )


@dataclasses.dataclass(frozen=True)
class LoadedAdapters:
    """Trained adapters and reward head of a run, not merged into the backbone."""

    config: PRMConfig
    partition: Partition
    backbone: pathlib.Path
    trainable: Any
    step: int
    tokenizer: transformers.PreTrainedTokenizerBase
    encoding: EncodingConfig

    @property
    def adapters(self) -> Lora:
        """Rank, scale and targets."""
        assert self.partition.lora is not None
        return self.partition.lora


def load_adapters(path: str | pathlib.Path, log: Log = warn) -> LoadedAdapters:
    """Loads float32 adapters and reward head of a run directory or of one of its checkpoints, on a single device.

    The checkpoint is selected and verified as in :func:`load_for_inference`.

    Raises:
      UserError: there is no checkpoint, it has no adapters, or the backbone was moved or modified.
    """
    run, steps = saving.candidates(path)
    check_model(run / MODEL)
    meta, encoding = read_prm(run / MODEL)
    if encoding is None or "lora" not in meta:
        raise UserError(f"{run} is not a run with adapters (train --lora_rank)")
    backbone, _ = loading.read_config(run / MODEL)
    config = PRMConfig(backbone, meta["head"], redundancy=meta.get("redundancy", False))
    partition = frozen.partition_of(meta, config)
    specs = partition.trainable
    mesh = rules.make_mesh(DeviceConfig(), jax.devices()[:1])
    abstract = abstract_tree(specs, shardings=rules.param_shardings(mesh, specs))
    trainable, step = _read_params(run, steps, abstract, log)
    return LoadedAdapters(
        config=config,
        partition=partition,
        backbone=frozen.backbone_directory(meta["lora"]),
        trainable=trainable,
        step=step,
        tokenizer=load_tokenizer(run / MODEL, encoding.marker, backbone.vocab_size),
        encoding=encoding,
    )


def _read_params(run: pathlib.Path, steps: Sequence[int], params: Any, log: Log) -> tuple[Any, int]:
    """(Parameters in the layout of params, step) of the first undamaged checkpoint of the steps.

    Raises:
      DamagedError: all are damaged; with the reason for each.
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
            log(f"{fault}; {at} is used instead")
        if note := checksums.note(at, meta):
            log(note)
        return found, step
    raise orbax_files.DamagedError("; ".join(faults))
