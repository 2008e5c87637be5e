"""Adapters alone, in the files of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors.

PEFT puts them on transformers' class for token classification with two labels, over the same backbone. The reward head
is one of PEFT's modules_to_save, as in every adapter for token classification; its rows are (0, w), as in a whole
export.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cfprm_jax.config import EncodingConfig
from cfprm_jax.huggingface.export import (
    EXPORT_DTYPES,
    FORMATS,
    PEFT_ADAPTER,
    ExportReport,
    check_export,
    counter,
    new_directory,
    plan_head,
)
from cfprm_jax.huggingface.from_devices import pieces
from cfprm_jax.huggingface.safetensors_files import DTYPES, PlannedTensor, write_file
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.lora import TARGETS, Lora, trainable_specs
from cfprm_jax.models.parameters import Params, lookup, walk

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapters(
    directory: str | pathlib.Path,
    trainable: Params,
    config: PRMConfig,
    lora: Lora,
    *,
    backbone: str,
    tokenizer: Any,
    encoding: EncodingConfig,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
    texts: Mapping[str, str] | None = None,
    first_layer: int = 0,
) -> ExportReport:
    """Write adapters and head as a directory that peft.PeftModel.from_pretrained loads, with tokenizer and prm.json.

    Args:
      trainable: of the structure of trainable_specs(config, lora, first_layer), with a linear head.
      backbone: hub name or directory of what the adapters belong to.
      first_layer: the layers below it have no adapters.
      Others as of hf_export.export, with the same errors.
    """
    directory = pathlib.Path(directory)
    check_export(directory, config, PEFT_ADAPTER, dtype)
    stored = EXPORT_DTYPES[dtype]
    tensors = list(_plan(trainable, config, lora, stored, first_layer))
    described = {CONFIG: adapter_config(lora, backbone, range(first_layer, config.backbone.num_hidden_layers))}
    with new_directory(directory, config, tokenizer, encoding, described=described, texts=texts or {}) as partial:
        write_file(partial / WEIGHTS, tensors, stored, counter(tensors, stored, progress))
    return ExportReport.of([WEIGHTS], tensors, stored)


def adapter_config(lora: Lora, backbone: str, layers: range = range(0)) -> dict[str, Any]:
    """adapter_config.json.

    Args:
      backbone: hub name or directory of what the adapters belong to.
      layers: those that have adapters; from 0, or empty, all.
    """
    return {
        "peft_type": "LORA",
        "task_type": "TOKEN_CLS",
        "base_model_name_or_path": backbone,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [TARGETS[target] for target in lora.targets],
        "modules_to_save": ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        **({"layers_to_transform": list(layers), "layers_pattern": "layers"} if layers.start else {}),
    }


def _plan(trainable: Params, config: PRMConfig, lora: Lora, stored: str, first_layer: int) -> Iterator[PlannedTensor]:
    dtype = DTYPES[stored]
    for path, spec in walk(trainable_specs(config, lora, first_layer)["backbone"], "backbone."):
        leaf = lookup(trainable, path)
        for layer, name in enumerate(spec.hf_names()):
            yield PlannedTensor(name, spec.shape[1:], functools.partial(pieces, leaf, dtype, layer))
    for tensor in plan_head(trainable["head"], config, FORMATS["token_classification"], dtype):
        yield PlannedTensor(f"base_model.model.{tensor.name}", tensor.shape, tensor.pieces)
