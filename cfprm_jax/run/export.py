"""Export of a trained PRM as a Hugging Face directory, with tokenizer and model card."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from cfprm_jax.checkpoints.model_files import GENERATION, MODEL
from cfprm_jax.checkpoints.retention import CHECKPOINTS
from cfprm_jax.checkpoints.saving import locate
from cfprm_jax.data.encoding import marker_id
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface.export import PEFT_ADAPTER, ExportReport, check_export, export
from cfprm_jax.huggingface.peft import export_adapters
from cfprm_jax.inference.loaded import LoadedAdapters, LoadedPRM, load_adapters, load_for_inference
from cfprm_jax.run import model_card, training_record
from cfprm_jax.run.options import ExportConfig
from cfprm_jax.runtime import config_files, output_paths
from cfprm_jax.runtime.progress import ProgressLine

Log = Callable[[str], None]


def export_run(config: ExportConfig, log: Log) -> ExportReport:
    """Exports the newest checkpoint of config.checkpoint, or the one it names, to config.output_dir.

    Args:
      log: receives lines about the checkpoint.

    Raises:
      UserError: invalid options, no checkpoint, or a format that does not support the network.
    """
    for name in ("checkpoint", "output_dir"):
        if not getattr(config, name):
            raise UserError(f"--{name} is required")
    directory = output_paths.require_new_directory("--output_dir", config.output_dir)
    log(f"export: {config.checkpoint} -> {directory} as {config.format} in {config.dtype}")
    return (_adapters if config.format == PEFT_ADAPTER else _whole)(config, directory, log)


def _whole(config: ExportConfig, output_dir: pathlib.Path, log: Log) -> ExportReport:
    # In the checkpoint's float32, so that weights are rounded to --dtype once.
    loaded = load_for_inference(config.checkpoint, dtype="float32", log=lambda line: log(f"checkpoint: {line}"))
    log(f"checkpoint: {_checkpoint(config, loaded.meta['step'])}")
    if config.drop_redundancy:
        loaded = without_redundancy(loaded)
    check_export(output_dir, loaded.config, config.format, config.dtype)
    texts = _texts(config, loaded, loaded.meta["step"])
    kept = locate(config.checkpoint)[0] / MODEL / GENERATION
    if kept.is_file():
        texts[GENERATION] = kept.read_text(encoding="utf-8")
    return export(
        output_dir,
        loaded.params,
        loaded.config,
        loaded.tokenizer,
        loaded.encoding,
        format=config.format,
        dtype=config.dtype,
        progress=_shown(ProgressLine("writing")),
        texts=texts,
    )


def without_redundancy(loaded: LoadedPRM) -> LoadedPRM:
    """The PRM without a redundancy output."""
    head = {name: value for name, value in loaded.params["head"].items() if name != "redundancy"}
    network = dataclasses.replace(loaded.config, redundancy=False)
    return dataclasses.replace(loaded, config=network, params={**loaded.params, "head": head})


def _adapters(config: ExportConfig, output_dir: pathlib.Path, log: Log) -> ExportReport:
    if config.drop_redundancy:
        raise UserError(f"--drop_redundancy is not for --format={config.format}, which supports the output")
    loaded = load_adapters(config.checkpoint, log=lambda line: log(f"checkpoint: {line}"))
    log(f"checkpoint: {_checkpoint(config, loaded.step)}")
    return export_adapters(
        output_dir,
        loaded.trainable,
        loaded.config,
        loaded.adapters,
        backbone=_base_model(config, loaded, loaded.step) or str(loaded.backbone),
        tokenizer=loaded.tokenizer,
        encoding=loaded.encoding,
        dtype=config.dtype,
        progress=_shown(ProgressLine("writing")),
        texts=_texts(config, loaded, loaded.step),
        first_layer=loaded.partition.frozen_layers,
    )


def _checkpoint(config: ExportConfig, step: int) -> pathlib.Path:
    """The loaded checkpoint; it is not the newest if that is damaged."""
    return locate(config.checkpoint)[0] / CHECKPOINTS / str(step)


def _texts(config: ExportConfig, loaded: LoadedPRM | LoadedAdapters, step: int) -> dict[str, str]:
    """The model card, and the flags of this export."""
    exported = model_card.ExportedPRM(
        name=pathlib.Path(config.output_dir).resolve().name,
        format=config.format,
        dtype=config.dtype,
        encoding=loaded.encoding,
        marker_id=marker_id(loaded.tokenizer, loaded.encoding.marker),
        model_type=loaded.config.backbone.model_type,
        redundancy=loaded.config.redundancy,
    )
    training = training_record.read_training(_checkpoint(config, step))
    card = model_card.render(exported, training, _base_model(config, loaded, step))
    return {"README.md": card, "export.flags": config_files.flag_file(config)}


def _base_model(config: ExportConfig, loaded: LoadedPRM | LoadedAdapters, step: int) -> str:
    training = training_record.read_training(_checkpoint(config, step))
    return config.base_model or training_record.base_model(training, loaded.config.backbone.to_hf())


def _shown(progress: ProgressLine) -> Callable[[int, int], None]:
    """A callback that shows the bytes written."""

    def show(done: int, total: int) -> None:
        text = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / progress.elapsed / 1e9:.2f} GB/s"
        if done == total:
            progress.end(text)
        else:
            progress.show(lambda: text, done / total)

    return show
