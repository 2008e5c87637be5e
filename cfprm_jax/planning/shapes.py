"""The published Qwen2.5 backbones by the names of their directories, so that a plan needs no files of a model."""

from __future__ import annotations

import pathlib
import re

from cfprm_jax.models.config import Qwen2Config

# hidden, mlp, layers, heads, key heads, vocabulary, tied: from the config.json of each size.
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
_NAME = re.compile(r"Qwen2\.5-(?:(Math|Coder)-)?(?:PRM-|RM-)?([\d.]+B)(?:-.*)?")


def known_backbone(directory: str | pathlib.Path) -> Qwen2Config | None:
    """The shape of "models/Qwen2.5-Math-7B" or "Qwen2.5-14B-Instruct"; None for any other name."""
    match = _NAME.fullmatch(pathlib.Path(directory).name.replace("Math-PRM-", "Math-").replace("Math-RM-", "Math-"))
    if match is None or match[2] not in _SIZES:
        return None
    hidden, mlp, layers, heads, kv_heads, vocab, tied = _SIZES[match[2]]
    math = match[1] == "Math"
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rope_theta=10000.0 if math else 1e6,
        max_position_embeddings=4096 if math else 32768,
        tie_word_embeddings=tied,
    )
