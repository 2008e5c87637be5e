"""What identifies a run: content of model and data, and the options that its result depends on. Validated on resume."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from cfprm_jax.data.loader import difference
from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import safetensors_files
from cfprm_jax.models import lora
from cfprm_jax.run.directory import FLAGS
from cfprm_jax.run.inputs import Sources
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.setup import Setup
from cfprm_jax.runtime import config_files, digests

MODEL_CONTENT = "content of the model"
# Options that change rounding at most, so that a resumed run may change them.
_OF_NO_EFFECT = ("attention", "remat", "accumulation", "deterministic")


def model_content(sources: Sources, raw: dict[str, Any]) -> str | None:
    """A digest of the backbone's weights and config.json; None if its weights are gone (:attr:`Sources.kept`).

    Args:
      raw: config.json.
    """
    weights = None
    if sources.init != "random":
        with contextlib.suppress(UserError):
            weights = safetensors_files.fingerprint(safetensors_files.list_directory(sources.model).tensors)
        if weights is None:
            return None
    # Fields that may change when a directory is saved again.
    config = {name: value for name, value in raw.items() if name not in ("_name_or_path", "transformers_version")}
    return digests.of_json([weights, config])


def fingerprint(config: TrainConfig, made: Setup) -> dict[str, Any]:
    """All that must be the same when a run is resumed, by name."""
    options = (
        config_files.as_dict(config.model) | config_files.as_dict(config.loss) | config_files.as_dict(config.optimizer)
    )
    for name in _OF_NO_EFFECT:
        del options[name]
    for record in made.frozen.values():
        options["weights of the backbone"] = record["backbone_sha256"]
    options |= _adapters(config.lora.lora_rank, config.lora.lora_alpha, config.lora.lora_targets)
    if config.frozen.frozen_layers:
        options["frozen_layers"] = config.frozen.frozen_layers
    return {
        **made.data.loader.fingerprint,
        **options,
        MODEL_CONTENT: model_content(made.sources, made.network.raw),
        "steps of the run": made.num_steps,
    }


def require_same(output_dir: pathlib.Path, meta: dict[str, Any], current: dict[str, Any]) -> None:
    """UserError naming every option in which a resumed run differs from its checkpoint.

    Args:
      meta: of the checkpoint.
      current: fingerprint of the resumed run.
    """
    saved, current = _canonical(meta["fingerprint"]), _canonical(current)
    # The model's content decides; its path only where the content is not stored, as in runs of earlier versions.
    stored = saved.get(MODEL_CONTENT) is not None and current[MODEL_CONTENT] is not None
    left_out = "model" if stored else MODEL_CONTENT
    saved, current = ({k: v for k, v in side.items() if k != left_out} for side in (saved, current))
    changed = difference(saved, current)
    if changed:
        raise UserError(
            f"--resume: {output_dir} was trained with other data or options: {changed}. Its own are in "
            f"{output_dir / FLAGS}: --flagfile={output_dir / FLAGS} --resume=auto"
        )


def _adapters(rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """The options of adapters, by name; empty without any. However targets are named and ordered, they are the same."""
    adapters = lora.parse(rank, alpha, targets)
    if adapters is None:
        return {}
    return {"lora_rank": adapters.rank, "lora_alpha": adapters.alpha, "lora_targets": list(adapters.targets)}


def _canonical(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as it comes back from JSON, where a tuple is a list; those of earlier versions as today's."""
    plain = json.loads(json.dumps(fingerprint))
    if "lora_rank" in plain:
        plain |= _adapters(plain["lora_rank"], plain["lora_alpha"], plain["lora_targets"])
    # They took options without effect, which are refused now.
    if plain.get("packing") != "tree":
        plain.pop("record_chunk", None)
    if (plain.get("loss"), plain.get("label_weight")) != ("q_ranking", "node"):
        plain.pop("ranking_negatives", None)
    if plain.get("loss") != "q_ranking":
        plain.pop("margin", None)
    if plain.get("decay") == "constant":
        plain.pop("final_rate_fraction", None)
    granularities = plain.get("granularities", [])
    if len(granularities) == 1 and "," not in granularities[0]:
        plain.pop("schedule", None)
    if not any(size.isdigit() and size != "1" for stage in granularities for size in stage.split(",")):
        for name in ("window_tail", "window_stride"):
            plain.pop(name, None)
    return plain
