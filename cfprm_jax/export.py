"""python -m cfprm_jax.export: exports a trained PRM as a Hugging Face directory for transformers, vLLM or PEFT."""

from __future__ import annotations

from cfprm_jax.runtime import process

if __name__ == "__main__":
    process.start()

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from cfprm_jax import flags
from cfprm_jax.config import CHECKPOINT_HELP
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import hub
from cfprm_jax.options import Options, option
from cfprm_jax.runtime import config_files
from cfprm_jax.runtime.progress import ProgressLine

if TYPE_CHECKING:
    from cfprm_jax.huggingface.export import ExportReport
    from cfprm_jax.inference.loaded import LoadedAdapters, LoadedPRM


@dataclasses.dataclass(frozen=True)
class ExportConfig(Options):
    """Export a trained PRM as a Hugging Face directory, with tokenizer and model card.

    python -m cfprm_jax.export --checkpoint=RUN --format=process_reward_model --output_dir=DIRECTORY

    Reads the newest checkpoint of a run of train, or the given one. Adapters are merged into their backbone, except
    with --format=peft_adapter. Runs in a single process, also for distributed runs.
    """

    checkpoint: str = option("", CHECKPOINT_HELP)
    format: str = option(
        "token_classification",
        "Format of the directory. token_classification: transformers' class for the backbone, such as "
        "LlamaForTokenClassification; for a linear head. process_reward_model, reward_model: the classes of "
        "Qwen2.5-Math-PRM and Qwen2.5-Math-RM, served by vLLM; for any head on Qwen2. peft_adapter: the adapters of a "
        "run with --lora_rank; for a linear head.",
        choices=("token_classification", "process_reward_model", "reward_model", "peft_adapter"),
    )
    output_dir: str = option("", "Directory to write; must be new or empty.")
    dtype: str = option("bfloat16", "Dtype of the exported weights.", choices=("bfloat16", "float32"))
    drop_redundancy: bool = option(
        False, "Drop the redundancy output, for formats that do not support it. Scores do not change."
    )
    base_model: str = option(
        "",
        "Name of the backbone on the hub, ORGANISATION/NAME, for the model card and for PEFT. Empty derives it from "
        "the path of the backbone.",
    )
    push_to_hub: str = option("", "Upload the directory to this repository of the Hugging Face hub, OWNER/NAME.")
    private: bool = option(True, "Create the repository of --push_to_hub as a private one.")


def _shown(progress: ProgressLine) -> Callable[[int, int], None]:
    """A callback that shows the bytes written."""

    def show(done: int, total: int) -> None:
        text = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / progress.elapsed / 1e9:.2f} GB/s"
        if done == total:
            progress.end(text)
        else:
            progress.show(lambda: text, done / total)

    return show


def main(config: ExportConfig) -> None:
    """Loads the newest state of config.checkpoint and exports it to config.output_dir."""
    for name in ("checkpoint", "output_dir"):
        if not getattr(config, name):
            raise UserError(f"--{name} is required")
    from cfprm_jax.huggingface.export import PEFT_ADAPTER, check_output_dir

    if config.push_to_hub:
        hub.check_name(config.push_to_hub)
    output_dir = pathlib.Path(config.output_dir)
    check_output_dir(output_dir)
    print(f"export: {config.checkpoint} -> {output_dir} as {config.format} in {config.dtype}", flush=True)
    report = _adapters(config, output_dir) if config.format == PEFT_ADAPTER else _whole(config, output_dir)
    print(
        f"wrote {output_dir}: {report.parameters:,} parameters, {report.stored_bytes / 1e9:.2f} GB "
        f"in {len(report.files)} file(s) of weights",
        flush=True,
    )
    if config.push_to_hub:
        print(f"uploaded: {hub.upload(output_dir, config.push_to_hub, config.private)}", flush=True)


def _whole(config: ExportConfig, output_dir: pathlib.Path) -> ExportReport:
    from cfprm_jax.checkpoints.model_files import GENERATION, MODEL
    from cfprm_jax.checkpoints.saving import locate
    from cfprm_jax.huggingface.export import check_export, export
    from cfprm_jax.inference.loaded import load_for_inference

    # In the checkpoint's float32, so that weights are rounded to --dtype once.
    loaded = load_for_inference(config.checkpoint, dtype="float32", log=_log_checkpoint)
    _log_checkpoint(str(_checkpoint(config, loaded.meta["step"])))
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
        config.format,
        config.dtype,
        progress=_shown(ProgressLine("writing")),
        texts=texts,
    )


def without_redundancy(loaded: LoadedPRM) -> LoadedPRM:
    """The PRM without a redundancy output."""
    head = {name: value for name, value in loaded.params["head"].items() if name != "redundancy"}
    network = dataclasses.replace(loaded.config, redundancy=False)
    return dataclasses.replace(loaded, config=network, params={**loaded.params, "head": head})


def _adapters(config: ExportConfig, output_dir: pathlib.Path) -> ExportReport:
    from cfprm_jax.huggingface.peft import export_adapters
    from cfprm_jax.inference.loaded import load_adapters

    if config.drop_redundancy:
        raise UserError(f"--drop_redundancy is not for --format={config.format}, which supports the output")
    loaded = load_adapters(config.checkpoint, log=_log_checkpoint)
    _log_checkpoint(str(_checkpoint(config, loaded.step)))
    return export_adapters(
        output_dir,
        loaded.trainable,
        loaded.config,
        loaded.adapters,
        _base_model(config, loaded, loaded.step) or str(loaded.backbone),
        loaded.tokenizer,
        loaded.encoding,
        config.dtype,
        progress=_shown(ProgressLine("writing")),
        texts=_texts(config, loaded, loaded.step),
        first_layer=loaded.partition.frozen_layers,
    )


def _log_checkpoint(line: str) -> None:
    print(f"checkpoint: {line}", flush=True)


def _checkpoint(config: ExportConfig, step: int) -> pathlib.Path:
    """The loaded checkpoint; it is not the newest if that is damaged."""
    from cfprm_jax.checkpoints.retention import CHECKPOINTS
    from cfprm_jax.checkpoints.saving import locate

    return locate(config.checkpoint)[0] / CHECKPOINTS / str(step)


def _texts(config: ExportConfig, loaded: LoadedPRM | LoadedAdapters, step: int) -> dict[str, str]:
    """The model card, and the flags of this export."""
    from cfprm_jax.data.encoding import marker_id
    from cfprm_jax.run import model_card

    exported = model_card.ExportedPRM(
        name=pathlib.Path(config.output_dir).resolve().name,
        format=config.format,
        dtype=config.dtype,
        encoding=loaded.encoding,
        marker_id=marker_id(loaded.tokenizer, loaded.encoding.marker),
        model_type=loaded.config.backbone.model_type,
        redundancy=loaded.config.redundancy,
    )
    training = model_card.read_training(_checkpoint(config, step))
    card = model_card.render(exported, training, _base_model(config, loaded, step))
    return {"README.md": card, "export.flags": config_files.flag_file(config)}


def _base_model(config: ExportConfig, loaded: LoadedPRM | LoadedAdapters, step: int) -> str:
    from cfprm_jax.run import model_card

    options = model_card.read_training(_checkpoint(config, step)).options
    return config.base_model or model_card.hub_name(options.get("model", ""), loaded.config.backbone.to_hf())


if __name__ == "__main__":
    sys.exit(flags.run(ExportConfig, main))
