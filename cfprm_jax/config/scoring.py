"""Options of the commands that score with a PRM."""

from __future__ import annotations

import dataclasses

from cfprm_jax.config.run import DeviceConfig
from cfprm_jax.config.shared import (
    ATTENTION_HELP,
    ATTENTIONS,
    CHECKPOINT_HELP,
    DTYPE_HELP,
    ENCODING_HELP,
    ENCODINGS,
    MOST_TOKENS,
    STEP_SEPARATOR_HELP,
)
from cfprm_jax.options import Options, option


@dataclasses.dataclass(frozen=True)
class ScoringConfig(Options):
    """The PRM and how it computes: base of the configurations of score, serve, process_bench and prm_bench."""

    model: str = option("", "Hugging Face directory of a PRM, or its name on the hub. Exclusive with --checkpoint.")
    checkpoint: str = option("", CHECKPOINT_HELP)
    encoding: str = option("auto", ENCODING_HELP, choices=ENCODINGS)
    step_separator: str = option("", STEP_SEPARATOR_HELP)
    dtype: str = option("auto", DTYPE_HELP, choices=("auto", "bfloat16", "float32"))
    attention: str = option("auto", ATTENTION_HELP, choices=ATTENTIONS)
    max_length: int = option(
        0,
        "Maximum length of a solution in tokens; longer ones are not scored. 0 is the maximum of training; for a PRM "
        "without prm.json, the smaller of 4096 and the positions of the model.",
        lower=8,
        upper=MOST_TOKENS,
        also=0,
    )
    device: DeviceConfig = dataclasses.field(default_factory=DeviceConfig)
