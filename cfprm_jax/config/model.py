"""Options of the network: backbone, adapters, frozen layers."""

from __future__ import annotations

import dataclasses

from cfprm_jax.config.shared import ATTENTION_HELP, ATTENTIONS
from cfprm_jax.errors import UserError
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class ModelConfig(Options):
    """Model and compute."""

    model: str = option(
        "synthetic",
        "Hugging Face directory or hub name (owner/name, owner/name@revision) of a backbone, or of a PRM as warm "
        "start. synthetic generates a small network; with data other than synthetic, it requires --init=random.",
    )
    init: str = option(
        "pretrained",
        "Initial weights: the safetensors files of --model, or random values drawn with --seed. For the latter --model "
        "needs no weights, only config.json and tokenizer.",
        choices=("pretrained", "random"),
    )
    head: str = option("linear", "Reward head: Linear, or Linear-ReLU-Linear.", choices=("linear", "mlp"))
    dtype: str = option("bfloat16", "Dtype of activations and matrix products.", choices=("bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    remat: str = option(
        "layer",
        "Rematerialisation: activations recomputed in the backward pass. none: no activations. mlp: those of the MLPs, "
        "the largest part. layer: all but the input of each layer; least memory, a third more FLOPs.",
        choices=("none", "mlp", "layer"),
    )
    deterministic: bool = option(
        False,
        "Bitwise reproducible training on GPUs: deterministic kernels only, without autotuning; slower. CPUs and TPUs "
        "are deterministic without it.",
    )


@dataclasses.dataclass(frozen=True)
class LoraConfig(Options):
    """LoRA adapters.

    Trained together with the reward head; the backbone is frozen.
    """

    lora_rank: int = option(0, "Rank of the adapters; 0 trains the full network.", lower=0, upper=8192)
    lora_alpha: float = option(
        32.0, "Scale of the adapters' output: multiplied by lora_alpha / lora_rank.", lower=1e-6, upper=1e6
    )
    lora_targets: tuple[str, ...] = option(
        ("query", "key", "value", "output", "gate", "up", "down"),
        "Weight matrices with adapters, by these names or Hugging Face's (q_proj, ...).",
        kind="list",
    )


CACHE_FROZEN_HELP = (
    "Where the output of the frozen layers is stored: it is computed once for each distinct token, and later epochs "
    "and runs read it. off computes it each time, auto is the user's cache, anything else is a directory. It takes 2 "
    "bytes (in float32 4) x width x tokens."
)


def checked_cache_frozen(value: str) -> str:
    """The value of --cache_frozen: off, where it is empty.

    Raises:
      UserError: a word that is meant for a switch, of which a directory would be made.
    """
    if value.lower() in ("true", "false", "on", "yes", "no"):
        raise UserError(f"--cache_frozen={value}: expected off, auto or a directory (./{value} for one of this name)")
    return value or "off"


@dataclasses.dataclass(frozen=True)
class FrozenConfig(Options):
    """Lower layers that keep their weights (docs/frozen_layers.md)."""

    frozen_layers: int = option(
        0,
        "Number of lowest decoder layers that are not trained, and the embedding with them: no gradients, no optimizer "
        "state, no backward pass. All layers trains the head alone; 0 freezes nothing.",
        lower=0,
        upper=1 << 14,
    )
    cache_frozen: str = option("off", CACHE_FROZEN_HELP)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "cache_frozen", checked_cache_frozen(self.cache_frozen))

    @property
    def cached(self) -> bool:
        """Whether the output of the frozen layers is read from a cache."""
        return self.frozen_layers > 0 and self.cache_frozen != "off"
