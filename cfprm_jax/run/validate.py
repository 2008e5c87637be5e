"""Validation of a run's options alone, before any file is read and any device is opened."""

from __future__ import annotations

import dataclasses

from cfprm_jax import options
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.options import parse_sizes
from cfprm_jax.models import lora
from cfprm_jax.run.options import SYNTHETIC, TrainConfig
from cfprm_jax.training import program


def validate_options(config: TrainConfig) -> None:
    """UserError for the first options that no files and no devices could satisfy."""
    _validate_sources(config)
    validate_training(config)
    if config.run.keep_best != "none" and not _has_held_out(config):
        raise UserError(f"--keep_best={config.run.keep_best} requires --eval_data, or an --eval_fraction above 0")
    if config.eval.bon_candidates:
        parse_sizes(config.eval.bon_n, "--bon_n")


def refuse_unused(config: TrainConfig) -> None:
    """UserError for an option that is set and has no effect beside the others.

    Apart from :func:`validate_options`, as the experiments set one of them for rows that differ in the others.
    """
    loss, packing, granularity = config.loss, config.packing, config.granularity
    if loss.loss != "q_ranking":
        options.refuse_unused(loss, ["margin"], f"--loss=q_ranking, not {loss.loss}")
    if (loss.loss, loss.label_weight) != ("q_ranking", "node"):
        purpose = f"--loss=q_ranking --label_weight=node, not --loss={loss.loss} --label_weight={loss.label_weight}"
        options.refuse_unused(loss, ["ranking_negatives"], purpose)
    if packing.packing != "tree":
        purpose = f"--packing=tree; --packing={packing.packing} shuffles single trajectories"
        options.refuse_unused(packing, ["record_chunk"], purpose)
    if not config.lora.lora_rank:
        options.refuse_unused(config.lora, ["lora_alpha", "lora_targets"], "runs with --lora_rank above 0")
    if config.optimizer.decay == "constant":
        options.refuse_unused(config.optimizer, ["final_rate_fraction"], "--decay=cosine and linear, not constant")
    granularity.refuse_unused()
    if len(granularity.stages) == 1:
        purpose = f"several granularities, and --granularities={granularity.stages[0]} is one"
        options.refuse_unused(granularity, ["schedule"], purpose)
    if not _has_held_out(config):
        purpose = "runs with --eval_data, or an --eval_fraction above 0"
        options.refuse_unused(config.run, ["eval_every"], purpose)
        options.refuse_unused(config.eval, ["eval_max_trajectories"], purpose)
    if not config.eval.bon_candidates:
        options.refuse_unused(config.eval, ["bon_n"], "runs with --bon_candidates")
    if config.distributed.distributed == "off":
        names = [field.name for field in dataclasses.fields(config.distributed) if field.name != "distributed"]
        options.refuse_unused(config.distributed, names, "distributed runs, not --distributed=off")


def _has_held_out(config: TrainConfig) -> bool:
    return bool(config.eval.eval_data or config.eval.eval_fraction or config.train_data == (SYNTHETIC,))


def _validate_sources(config: TrainConfig) -> None:
    if not config.train_data:
        raise UserError("--train_data is empty: give corpora to train on, or synthetic")
    if SYNTHETIC in config.train_data and len(config.train_data) > 1:
        raise UserError(f"--train_data={','.join(config.train_data)}: synthetic cannot be combined with files")
    if config.model.model == SYNTHETIC and config.train_data != (SYNTHETIC,) and config.model.init != "random":
        raise UserError(
            "--model is missing: give the backbone's Hugging Face directory or its name on the hub. For a small "
            "network with random weights, without a download: --model=synthetic --init=random"
        )


def validate_training(config: TrainConfig) -> None:
    """UserError for options of what is trained that exclude each other."""
    adapters = lora.parse(config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_targets)
    if adapters is not None and (config.model.init == "random" or config.model.model == SYNTHETIC):
        raise UserError("--lora_rank needs a backbone with weights of its own; no checkpoint would hold random ones")
    if config.frozen.frozen_layers and (config.model.init == "random" or config.model.model == SYNTHETIC):
        raise UserError(
            f"--frozen_layers={config.frozen.frozen_layers} needs a backbone with weights of its own; no checkpoint "
            "would hold random ones"
        )
    if config.frozen.cache_frozen != "off" and not config.frozen.frozen_layers:
        raise UserError("--cache_frozen needs --frozen_layers: without frozen layers there is nothing to keep")
    program.refuse_optimizer(config.optimizer.optimizer, config.model.dtype, adapters)
