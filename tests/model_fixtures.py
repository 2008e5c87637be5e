"""Small models of the real architecture, here and in transformers, for the tests of cfprm_jax.models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest


class Rows(NamedTuple):
    """A packed batch's inputs of the model, on the host."""

    tokens: np.ndarray
    positions: np.ndarray
    subtree_end: np.ndarray


def plain_rows(tokens: np.ndarray, first_position: int = 0) -> Rows:
    """One sequence a row, no padding."""
    rows, length = tokens.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32) + first_position, (rows, length))
    return Rows(tokens.astype(np.int32), positions, np.full((rows, length), length, np.int32))


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., Rows]:
    return plain_rows


@pytest.fixture(scope="session")
def make_reference() -> Callable[..., Any]:
    """Makes a random transformers model (by class name) in which nothing is 0 or 1 that could hide a mistake."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(class_name: str = "Qwen2ForTokenClassification", seed: int = 0, **changes: Any) -> Any:
        settings = {
            "vocab_size": 97,
            "hidden_size": 56,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "rope_theta": 1e4,
            "initializer_range": 0.1,
        }
        family = re.split("For|Model", class_name)[0]
        config = getattr(transformers, f"{family}Config")(**{**settings, **changes})
        generator = torch.Generator().manual_seed(seed)
        model = getattr(transformers, class_name)(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.3 * noise)
                elif name.endswith("bias"):
                    parameter.copy_(0.5 * noise)
                else:
                    parameter.copy_(0.15 * noise)
        return model

    return make


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer with the marker and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    from cfprm_jax.data.encoding import load_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate(sorted(alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<extra_0>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}assistant: "
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def random_params() -> Callable[..., Any]:
    """Parameters in which biases and norms are random, too."""
    from cfprm_jax.models.parameters import map_specs

    def make(config: Any, seed: int = 0, dtype: Any = np.float32) -> Any:
        generator = np.random.default_rng(seed)

        def one(path: str, spec: Any) -> jax.Array:
            noise = generator.standard_normal(spec.shape).astype(np.float32)
            value = {"norm": 1 + 0.3 * noise, "bias": 0.5 * noise}.get(spec.kind, 0.15 * noise)
            return jax.numpy.asarray(value, spec.dtype or dtype)

        return map_specs(one, config)

    return make
