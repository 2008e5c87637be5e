"""A tokenizer small enough to be made in a test: bytes, a few merges, special tokens and a chat template."""

from __future__ import annotations

import json
import pathlib

import pytest
import tokenizers
import transformers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKER = "<extra_0>"


def write_tokenizer(
    directory: pathlib.Path,
    special: tuple[str, ...] = ("<|pad|>", "<|start|>", "<|end|>", MARKER),
    added: tuple[str, ...] = ("<tool>",),
    words: tuple[str, ...] = (),
    chat_template: str | None = CHAT_TEMPLATE,
) -> pathlib.Path:
    """A byte-level BPE tokenizer whose first 256 ids are the bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("Ċ", "Ċ"), (".", "ĊĊ")]
    for word in words:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([tokenizers.AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template)
    tokenizer.save_pretrained(str(directory), save_jinja_files=False)
    return directory


def write_rows(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """Stepwise rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_tokenizer():
    """write_tokenizer, for tests that need another tokenizer."""
    return write_tokenizer


@pytest.fixture(scope="session")
def make_rows():
    """write_rows."""
    return write_rows


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a small tokenizer that has the marker."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
    """That tokenizer, loaded."""
    from cfprm_jax.data.encoding import load_tokenizer

    return load_tokenizer(tokenizer_dir)
