"""The step that a plan is for, from the command's options: its network and the shape of its batches."""

from __future__ import annotations

import pathlib

from cfprm_jax.data import row_shapes
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import loading
from cfprm_jax.model_directory.json_files import read_object
from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.planning import shapes
from cfprm_jax.planning.ahead import PlannedStep, round_rows
from cfprm_jax.planning.options import PlanConfig
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import refuse_unused, validate_training

# One after another, 32 solutions of PRM800K phase 1 fill 6 to 11 rows of 2,048; in trees of shared prefixes, fewer.
_SHARE_OF_LONGEST = 3


def planned_step(config: PlanConfig) -> PlannedStep:
    """The step that train would compile.

    Raises:
      UserError: the model's shape is not known, it does not take rows of that length, or as train for options that
        exclude each other.
    """
    plan, train = config.plan, config.train
    validate_training(train)
    refuse_unused(train)
    backbone = find_backbone(train.model.model, plan.model_config)
    backbone.check_length(train.encoding.max_length)
    packing, accumulation = train.packing, train.optimizer.accumulation
    length = packing.row_length or row_shapes.row_lengths(packing, train.encoding.max_length)[-1]
    solutions = batch_solutions(train)
    rows = plan.rows or solutions
    if not plan.rows and packing.packing != "none":
        tokens = packing.batch_tokens or -(-packing.batch_size * train.encoding.max_length // _SHARE_OF_LONGEST)
        rows = -(-tokens // length)
    return PlannedStep(
        config=train,
        backbone=backbone,
        num_devices=plan.num_devices,
        rows=round_rows(rows, train.device.mesh, plan.num_devices, accumulation),
        length=length,
        trajectories=solutions,
    )


def batch_solutions(train: TrainConfig) -> int:
    """Solutions of a batch: --batch_size, or as many of a third of --max_length as have --batch_tokens."""
    tokens, each = train.packing.batch_tokens, train.encoding.max_length / _SHARE_OF_LONGEST
    return max(round(tokens / each), 1) if tokens else train.packing.batch_size


def find_backbone(model: str, model_config: str) -> BackboneConfig:
    """The shape that --model_config, the directory --model or its name describes, in this order.

    Raises:
      UserError: none of them does.
    """
    if model_config:
        try:
            return BackboneConfig.from_hf(read_object(pathlib.Path(model_config)))
        except UserError as error:
            raise UserError(f"--model_config={model_config}: {str(error).removeprefix(f'{model_config}: ')}") from error
    if (pathlib.Path(model) / "config.json").is_file():
        return loading.read_config(model)[0]
    backbone = shapes.known_backbone(model)
    if backbone is None:
        raise UserError(
            f"--model={model} is no directory with a config.json here, nor the name of a published Qwen2.5, "
            "Qwen3, Llama 3 or Mistral 7B; give the shape by --model_config=FILE"
        )
    return backbone


def describe_rows(config: PlanConfig, planned: PlannedStep) -> str:
    """The planned shape, the flags that it follows from, and the other shapes of a run."""
    packing, longest = config.train.packing, config.train.encoding.max_length
    solutions, accumulation = batch_solutions(config.train), config.train.optimizer.accumulation
    most = round_rows(solutions, config.train.device.mesh, planned.num_devices, accumulation)
    size = f"--batch_tokens={packing.batch_tokens}" if packing.batch_tokens else f"--batch_size={packing.batch_size}"
    if config.plan.rows:
        assumed = "--rows"
    elif packing.packing == "none":
        assumed = f"one for each of {size} solutions"
        if packing.batch_tokens:
            assumed = f"one for each of {solutions} solutions of {size}"
    elif packing.batch_tokens:
        assumed = f"for {size}"
    else:
        assumed = (
            f"for --batch_size={packing.batch_size} solutions that fill {longest // _SHARE_OF_LONGEST} tokens each"
        )
    text = f"{assumed}, of the longest that --packing={packing.packing} makes"
    if packing.row_length:
        text = f"{assumed}, of --row_length"
    if planned.rows < most:
        text += (
            "; a run's shapes follow its data, and train prints them: --rows and --row_length plan others, "
            f"up to {most} x {planned.length} for nothing but the longest solutions"
        )
    return text
