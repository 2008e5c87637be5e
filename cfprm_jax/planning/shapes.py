"""Published backbones by the names of their directories, so that a plan needs no files of a model."""

from __future__ import annotations

import pathlib
import re
from typing import Any

from cfprm_jax.models.config import BackboneConfig
from cfprm_jax.models.rope_scaling import Llama3Scaling

# hidden, mlp, layers, heads, key heads, vocabulary, tied: from the config.json of each size.
_QWEN2_5 = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "3B": (2048, 11008, 36, 16, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "14B": (5120, 13824, 48, 40, 8, 152064, False),
    "32B": (5120, 27648, 64, 40, 8, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, 151936, True),
    "1.7B": (2048, 6144, 28, 16, 8, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 151936, True),
    "8B": (4096, 12288, 36, 32, 8, 151936, False),
    "14B": (5120, 17408, 40, 40, 8, 151936, False),
    "32B": (5120, 25600, 64, 64, 8, 151936, False),
}
_LLAMA3 = {
    "3.1-8B": (4096, 14336, 32, 32, 8, 128256, False),
    "3.1-70B": (8192, 28672, 80, 64, 8, 128256, False),
    "3.2-1B": (2048, 8192, 16, 32, 8, 128256, True),
    "3.2-3B": (3072, 8192, 28, 24, 8, 128256, True),
    "3.3-70B": (8192, 28672, 80, 64, 8, 128256, False),
}
# Vocabulary, theta, sliding window of the versions of the 7B.
_MISTRAL = {"0.1": (32000, 1e4, 4096), "0.2": (32000, 1e6, None), "0.3": (32768, 1e6, None)}

_QWEN2_5_NAME = re.compile(r"Qwen2\.5-(?:(Math|Coder)-)?(?:PRM-|RM-)?([\d.]+B)(?:-.*)?")
_QWEN3_NAME = re.compile(r"Qwen3-([\d.]+B)(?:-Base)?")
_LLAMA3_NAME = re.compile(r"(?:Meta-)?Llama-(3\.\d-\d+B)(?:-Instruct)?")
_MISTRAL_NAME = re.compile(r"Mistral-7B-(?:Instruct-)?v(0\.\d)")


def known_backbone(directory: str | pathlib.Path) -> BackboneConfig | None:
    """The shape of "models/Qwen2.5-Math-7B", "Qwen3-8B" or "Llama-3.1-8B-Instruct"; None for any other name."""
    name = pathlib.Path(directory).name
    found = _QWEN2_5_NAME.fullmatch(name.replace("Math-PRM-", "Math-").replace("Math-RM-", "Math-"))
    if found and found[2] in _QWEN2_5:
        math = found[1] == "Math"
        positions, theta = (4096, 1e4) if math else (32768, 1e6)
        return _backbone(_QWEN2_5[found[2]], rope_theta=theta, max_position_embeddings=positions)
    found = _QWEN3_NAME.fullmatch(name)
    if found and found[1] in _QWEN3:
        return _backbone(_QWEN3[found[1]], 128, model_type="qwen3", max_position_embeddings=40960)
    found = _LLAMA3_NAME.fullmatch(name)
    if found and found[1] in _LLAMA3:
        # Small ones were made for the same context from a larger factor.
        scaling = Llama3Scaling(32.0 if found[1].startswith("3.2") else 8.0, 1.0, 4.0, 8192)
        return _backbone(
            _LLAMA3[found[1]],
            model_type="llama",
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            rope_scaling=scaling,
            max_position_embeddings=131072,
        )
    found = _MISTRAL_NAME.fullmatch(name)
    if found and found[1] in _MISTRAL:
        vocab, theta, window = _MISTRAL[found[1]]
        shape = (4096, 14336, 32, 32, 8, vocab, False)
        return _backbone(shape, model_type="mistral", rms_norm_eps=1e-5, rope_theta=theta, sliding_window=window)
    return None


def _backbone(
    shape: tuple[int, int, int, int, int, int, bool], head_dim: int | None = None, **options: Any
) -> BackboneConfig:
    hidden, mlp, layers, heads, kv_heads, vocab, tied = shape
    return BackboneConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        tie_word_embeddings=tied,
        **options,
    )
