"""Configuration: frozen dataclasses, one per subject, filled from flags by the commands and passed to everything below.

Nothing here reads a flag, a file, a device or a clock. The fields are options (:mod:`cfprm_jax.options`), from which
the flags, their validation and the configuration file beside the output of a run are derived.

Every number has bounds. A value within them may still be a bad choice; a value outside them has no meaning, or needs
memory or time that no machine has.
"""

from __future__ import annotations

from cfprm_jax.config.data import EncodingConfig, EstimateConfig, GranularityConfig, PackingConfig, ReadConfig
from cfprm_jax.config.model import CACHE_FROZEN_HELP, FrozenConfig, LoraConfig, ModelConfig, checked_cache_frozen
from cfprm_jax.config.run import DeviceConfig, DistributedConfig, RunConfig
from cfprm_jax.config.scoring import ScoringConfig
from cfprm_jax.config.shared import (
    AFTER_FIRST_ERROR,
    AGGREGATIONS,
    ATTENTION_HELP,
    ATTENTIONS,
    CHECKPOINT_HELP,
    DATA_FORMATS,
    DTYPE_HELP,
    ENCODING_HELP,
    ENCODINGS,
    ESTIMATES,
    LABEL_WEIGHTS,
    LARGEST_SEED,
    LOGGERS,
    LONGEST_WAIT,
    LOSSES,
    MARKER,
    MOST_CANDIDATES,
    MOST_COUNT,
    MOST_GRANULARITY,
    MOST_STEPS,
    MOST_TOKENS,
    NAMED_GRANULARITIES,
    PACKINGS,
    QWEN_MARKER_ID,
    SCHEDULES,
    STEP_SEPARATOR_HELP,
    SYSTEM_PROMPT,
    Granularity,
    decode_escapes,
    finest_first,
    parse_granularity,
)
from cfprm_jax.config.training import EvalConfig, LossConfig, OptimizerConfig

__all__ = [
    "AFTER_FIRST_ERROR",
    "AGGREGATIONS",
    "ATTENTIONS",
    "ATTENTION_HELP",
    "CACHE_FROZEN_HELP",
    "CHECKPOINT_HELP",
    "DATA_FORMATS",
    "DTYPE_HELP",
    "ENCODINGS",
    "ENCODING_HELP",
    "ESTIMATES",
    "LABEL_WEIGHTS",
    "LARGEST_SEED",
    "LOGGERS",
    "LONGEST_WAIT",
    "LOSSES",
    "MARKER",
    "MOST_CANDIDATES",
    "MOST_COUNT",
    "MOST_GRANULARITY",
    "MOST_STEPS",
    "MOST_TOKENS",
    "NAMED_GRANULARITIES",
    "PACKINGS",
    "QWEN_MARKER_ID",
    "SCHEDULES",
    "STEP_SEPARATOR_HELP",
    "SYSTEM_PROMPT",
    "DeviceConfig",
    "DistributedConfig",
    "EncodingConfig",
    "EstimateConfig",
    "EvalConfig",
    "FrozenConfig",
    "Granularity",
    "GranularityConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PackingConfig",
    "ReadConfig",
    "RunConfig",
    "ScoringConfig",
    "checked_cache_frozen",
    "decode_escapes",
    "finest_first",
    "parse_granularity",
]
