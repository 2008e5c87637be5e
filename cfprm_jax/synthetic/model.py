"""A Qwen2 configuration small enough to learn the arithmetic world from random weights in a minute on two CPU cores."""

from __future__ import annotations

from typing import Any


def make_config(vocab_size: int) -> dict[str, Any]:
    """The config.json of the small network."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        # About 1 / sqrt(hidden_size). From the usual 0.02 so narrow a network hardly begins to learn.
        "initializer_range": 0.12,
        "pad_token_id": 0,
        "dtype": "float32",
    }
