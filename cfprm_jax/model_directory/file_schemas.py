"""The fields of a model directory's JSON files that are read here, with their types and the bounds of their meaning.

Fields that nothing here reads may hold anything: a config.json is kept whole for exports. Upper bounds lie an order of
magnitude or more above what has been published, and stop noise before it costs time or memory: no network has ten
million layers.
"""

from __future__ import annotations

from cfprm_jax.config import EncodingConfig, ModelConfig
from cfprm_jax.model_directory.schema import (
    BOOLEAN,
    TEXT,
    Fault,
    Kind,
    Schema,
    either,
    list_of,
    mapping,
    may_lack,
    number,
    of_options,
    one_of,
    optional,
    record,
    required,
    text,
    whole,
)

# Positions are float32 in rotary embeddings, which holds whole numbers exactly up to here.
MOST_POSITIONS = 1 << 24
_LARGEST_ID = (1 << 31) - 1  # ids are int32
_ID = whole(0, _LARGEST_ID)
# Some published files have -1 for a token that there is not.
_ID_OR_NONE = whole(-1, _LARGEST_ID)
_POSITIVE = whole(1, 1 << 10)

# config.json of a decoder. Lists of values of a supported kind, and what a value means, are in models/families.py.
BACKBONE = {
    "model_type": required(text(100)),
    "vocab_size": required(whole(1, 1 << 24)),
    "hidden_size": required(whole(1, 1 << 17)),
    "intermediate_size": required(whole(1, 1 << 20)),
    "num_hidden_layers": required(_POSITIVE),
    "num_attention_heads": required(_POSITIVE),
    "num_key_value_heads": optional(_POSITIVE),
    "head_dim": optional(whole(1, 1 << 13)),
    "max_position_embeddings": optional(whole(1, MOST_POSITIONS)),
    "rms_norm_eps": optional(number(0, 1, above=True)),
    "rope_theta": optional(number(0, 1e12, above=True)),
    "initializer_range": optional(number(0, 100, above=True)),
    "tie_word_embeddings": optional(BOOLEAN),
    "hidden_act": optional(text(100)),
    "use_sliding_window": optional(BOOLEAN),
    "sliding_window": optional(whole(1, MOST_POSITIONS)),
    "max_window_layers": optional(whole(0, 1 << 10)),
    "layer_types": optional(list_of(text(100), 0, 1 << 10)),
    "use_mrope": optional(BOOLEAN),
    "attention_bias": optional(BOOLEAN),
    "qkv_bias": optional(BOOLEAN),
    "mlp_bias": optional(BOOLEAN),
    "attention_dropout": optional(number(0, 1)),
    "use_qk_norm": optional(BOOLEAN),
    "qk_norm": optional(BOOLEAN),
    "partial_rotary_factor": optional(number(0, 1, above=True)),
    "architectures": optional(list_of(text(1000), 0, 100)),
    "bos_token_id": optional(either(_ID_OR_NONE, list_of(_ID_OR_NONE, 0, 1000))),
    "eos_token_id": optional(either(_ID_OR_NONE, list_of(_ID_OR_NONE, 0, 1000))),
    "pad_token_id": optional(_ID_OR_NONE),
}

# rope_scaling (transformers 4) and rope_parameters (5), where they are objects.
ROPE = {
    "rope_type": optional(text(100)),
    "type": optional(text(100)),
    "rope_theta": optional(number(0, 1e12, above=True)),
    "factor": optional(number(0, 1e6, above=True)),
    "low_freq_factor": optional(number(0, 1e6, above=True)),
    "high_freq_factor": optional(number(0, 1e6, above=True)),
    "original_max_position_embeddings": optional(whole(1, MOST_POSITIONS)),
    "partial_rotary_factor": optional(number(0, 1, above=True)),
}

GENERATION = {"eos_token_id": optional(either(_ID, list_of(_ID, 0, 1000)))}

_FROZEN_WEIGHTS = {
    "backbone": required(text(4096, empty=False)),
    "backbone_dtype": required(one_of("bfloat16", "float32")),
    "backbone_sha256": required(text(1000)),
}

PRM = {
    "head": required(one_of("linear", "mlp")),
    "encoding": required(
        of_options(
            EncodingConfig,
            needed=("max_length", "step_separator", "marker", "system_prompt"),
            bounds={"max_length": whole(8, MOST_POSITIONS), "marker": text(1000, empty=False)},
        )
    ),
    "redundancy": may_lack(BOOLEAN),
    "dtype": may_lack(one_of(*ModelConfig.__dataclass_fields__["dtype"].metadata["choices"])),
    "marker_renamed_from": may_lack(text(10_000, empty=False)),
    "lora": may_lack(
        record(
            {
                "rank": required(whole(1, 1 << 17)),
                "alpha": required(number(0, 1e6, above=True)),
                "targets": required(
                    list_of(one_of("query", "key", "value", "output", "gate", "up", "down"), 1, 7),
                ),
                "frozen_layers": may_lack(whole(1, 1 << 17)),
                **_FROZEN_WEIGHTS,
            }
        )
    ),
    "frozen": may_lack(record({"layers": required(whole(1, 1 << 17)), **_FROZEN_WEIGHTS})),
}


def _file_name(ending: str) -> Kind:
    """A name without a folder."""
    expected = f"the name of a {ending} file beside it"

    def holds(value: object) -> bool:
        if not isinstance(value, str) or not value.endswith(ending) or not value.isprintable():
            return False
        return len(value.encode()) <= 255 and not set(value) & set("/\\")

    return Kind(expected, lambda value, at: None if holds(value) else Fault(at, value, expected))


INDEX = {"weight_map": required(mapping(_file_name(".safetensors"), text(1000)))}

# An entry of a safetensors header.
_SIZE = whole(0, 1 << 50)
TENSOR = record(
    {
        "dtype": required(text(100)),
        "shape": required(list_of(_SIZE, 0, 16)),
        "data_offsets": required(list_of(_SIZE, 2, 2)),
    }
)
HEADER_METADATA = mapping(TEXT)

_CONTENT = required(text(10_000, empty=False))
_ADDED_TOKEN = record({"content": _CONTENT, "id": required(_ID), "special": may_lack(BOOLEAN)})
# Unigram models have a list of [piece, score], the others ids by token.
VOCABULARY = mapping(_ID)
_PIECE = list_of(either(TEXT, number(-1e38, 1e38)), 2, 2)
TOKENIZER = {
    "model": required(
        record(
            {
                "type": optional(text(100)),
                "vocab": required(either(VOCABULARY, list_of(_PIECE, 1))),
                "merges": may_lack(list_of(either(TEXT, list_of(TEXT, 2, 2)))),
            }
        )
    ),
    "added_tokens": optional(list_of(_ADDED_TOKEN)),
}

# Nothing is taken from it; it must be an object.
ADDED_TOKENS: Schema = {}
_TOKEN = either(text(10_000), record({"content": required(text(10_000))}))
SPECIAL_TOKENS = {
    **{f"{name}_token": optional(_TOKEN) for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")},
    "additional_special_tokens": optional(list_of(_TOKEN)),
}
TOKENIZER_CONFIG = {
    **SPECIAL_TOKENS,
    "tokenizer_class": optional(text(1000)),
    "chat_template": optional(
        either(text(1 << 20), list_of(record({"name": required(text(1000)), "template": required(text(1 << 20))})))
    ),
    "added_tokens_decoder": optional(mapping(record({"content": _CONTENT}))),
    "marker_renamed_from": may_lack(text(10_000, empty=False)),
}
