"""What a run reads before its first step: input files, the shape of the network, Best-of-N candidates."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from cfprm_jax.checkpoints import model_files, retention
from cfprm_jax.checkpoints.model_files import MODEL
from cfprm_jax.data.candidates import Question, read_candidates
from cfprm_jax.data.formats import files
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import parse_sizes
from cfprm_jax.huggingface import hub, loading
from cfprm_jax.models import parameters
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.partition import Partition
from cfprm_jax.run import assembly, warm_start
from cfprm_jax.run.options import SYNTHETIC, TrainConfig
from cfprm_jax.sharding import rules

# Weights in formats that are not read, of which the loader's own error tells more.
_OTHERS_WEIGHTS = (".safetensors.index.json", "adapter_config.json", ".bin", ".pt", ".pth", ".gguf")
LogLine = Callable[[str], None]
"""Logs one line of text; on the main process it prints it."""


class Sources(NamedTuple):
    """The input files of a run; synthetic ones are written by then."""

    model: pathlib.Path
    init: str  # pretrained or random
    train: tuple[str, ...]
    held_out: tuple[str, ...]  # empty: a share of the questions of train
    candidates: str
    kept: bool = False  # model is that of the resumed run's own directory, without weights


class Network(NamedTuple):
    """The PRM, without any weights."""

    config: PRMConfig
    raw: dict[str, Any]  # the backbone's config.json
    partition: Partition  # what of it is trained


def require_files(config: TrainConfig) -> None:
    """UserError, naming the flag, unless all input files of a run are there; before anything is generated."""
    train, candidates = config.train_data, config.eval.bon_candidates
    files.require(
        train_data=() if train == (SYNTHETIC,) else train,
        eval_data=config.eval.eval_data,
        bon_candidates="" if candidates == SYNTHETIC else candidates,
    )


def materialise(config: TrainConfig, output_dir: pathlib.Path) -> Sources:
    """The input files of a run; a model named as on the hub is downloaded.

    Synthetic files are written into output_dir/synthetic, the same for the same seed; of a run on other data, only
    those of the network.

    Raises:
      UserError: a model named as on the hub that cannot be had.
    """
    directory, kept = _model_directory(config, output_dir)
    given = (config.train_data, config.eval.eval_data, config.eval.bon_candidates)
    sources = Sources(directory, config.model.init, *given, kept=kept)
    synthetic_data = config.train_data == (SYNTHETIC,)
    if not (synthetic_data or SYNTHETIC in (config.model.model, config.eval.bon_candidates)):
        return sources
    from cfprm_jax import synthetic  # imported only where it is used

    directory = output_dir / SYNTHETIC
    if not synthetic_data and config.eval.bon_candidates != SYNTHETIC:  # a small network for data of one's own
        return sources._replace(model=synthetic.materialise_model(directory / "model"), init="random")
    made = synthetic.materialise(directory, config.run.seed)
    if synthetic_data:
        sources = sources._replace(train=(str(made.train),), held_out=sources.held_out or (str(made.held_out),))
    if config.model.model == SYNTHETIC:
        sources = sources._replace(model=pathlib.Path(made.model), init="random")
    if config.eval.bon_candidates == SYNTHETIC:
        sources = sources._replace(candidates=str(made.candidates))
    return sources


def _model_directory(config: TrainConfig, output_dir: pathlib.Path) -> tuple[pathlib.Path, bool]:
    """The directory of --model; or RUN/model, and True, if it is gone and the run can be resumed without it.

    Checkpoints hold all weights but frozen ones. Of the directory a resume needs config.json and tokenizer alone, which
    the run has.
    """
    own = output_dir / MODEL
    fixed = config.lora.lora_rank or config.frozen.frozen_layers or config.model.model == SYNTHETIC
    resumed = config.run.resume != "never" and bool(retention.complete(output_dir / retention.CHECKPOINTS))
    spare = resumed and not fixed and (own / "config.json").is_file()
    try:
        directory = pathlib.Path(hub.local_directory(config.model.model))
    except UserError:
        if not spare:
            raise
        return own, True
    lacking = not (directory / "config.json").is_file() or (config.model.init != "random" and not _weights(directory))
    return (own, True) if spare and lacking else (directory, False)


def _weights(directory: pathlib.Path) -> bool:
    """Whether a directory has files of weights, in any format."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return any(name.endswith((".safetensors", *_OTHERS_WEIGHTS)) for name in names)


def adopt_prm_options(config: TrainConfig, sources: Sources, log: LogLine) -> TrainConfig:
    """For a warm start from a PRM, or a resume without it: the options with head and encoding of its directory.

    Raises:
      UserError: the directory has no weights, or options that do not fit the PRM.
    """
    if sources.kept:
        model_files.check_model(sources.model)
        model, encoding = warm_start.adopt_own(sources.model, config.model, config.encoding, config.given)
        gone = f"the weights of --model={config.model.model} are gone and not needed"
        log(f"resume      {gone}; {sources.model} has the rest")
        return dataclasses.replace(config, model=model, encoding=encoding)
    if sources.init == "random":
        return config
    if (sources.model / "config.json").is_file() and not _weights(sources.model):
        loading.read_config(sources.model)  # whose errors come first
        frozen = config.lora.lora_rank or config.frozen.frozen_layers
        raise UserError(
            f"--model={sources.model} has a config.json and no weights (model.safetensors or "
            "model.safetensors.index.json); "
            + (
                "the frozen ones are in no checkpoint"
                if frozen
                else "--init=random trains such a network from random weights"
            )
        )
    adopted = warm_start.adopt(sources.model, config.model, config.encoding, config.given, config.loss.redundancy)
    for line in adopted.lines:
        log(f"warm start  {line}")
    return dataclasses.replace(config, model=adopted.model, encoding=adopted.encoding)


def open_network(config: TrainConfig, sources: Sources, mesh: Mesh) -> Network:
    """The shape of the network, before any weight is read.

    Raises:
      UserError: a mesh that does not divide it, or more frozen layers than it has.
    """
    backbone, raw = loading.read_config(sources.model)
    network = assembly.define_network(config, backbone, mesh)
    rules.param_shardings(mesh, parameters.param_specs(network))
    return Network(network, raw, assembly.partition_of(config, network))


def open_candidates(path: str, sizes: tuple[str, ...]) -> list[Question]:
    """The candidates to choose from after training, read before it, so that a bad file costs no run.

    Raises:
      UserError: the file is no candidates file, a question has fewer candidates than the largest of sizes, or a
        candidate has no "correct".
    """
    questions = list(read_candidates([path]))
    largest = max(parse_sizes(sizes, "--bon_n"), default=1)
    for question in questions:
        if len(question.candidates) < largest:
            raise UserError(f"{question.source}: {len(question.candidates)} candidates, but --bon_n needs {largest}")
        for number, candidate in enumerate(question.candidates):
            if candidate.correct is None:
                raise UserError(
                    f'{question.source}: candidate {number} has no "correct"; score the candidates after training, and '
                    "let bon grade them"
                )
    return questions
