"""The marker of a tokenizer that has none: a token in reserve is renamed, and nothing else changes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tokenizers
import transformers

from cfprm_jax import synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.reserved_tokens import reserved_token
from cfprm_jax.model_directory.tokenizer_files import load_tokenizer, marker_id, marker_origin, save_tokenizer

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=1, candidates_per_problem=1)
LLAMA, MISTRAL, TEKKEN = "<|reserved_special_token_0|>", "[control_8]", "<SPECIAL_20>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD).model


@pytest.fixture
def with_token(model, tmp_path):
    """A directory whose tokenizer has another token in the place of the marker, optionally in the vocabulary too."""

    def make(name, in_vocabulary=False):
        shutil.copytree(model, tmp_path / "model")
        for path in (tmp_path / "model").glob("*token*.json"):
            path.write_text(path.read_text().replace("<extra_0>", name))
        if in_vocabulary:
            path = tmp_path / "model" / "tokenizer.json"
            described = json.loads(path.read_text())
            described["model"]["vocab"] |= {token["content"]: token["id"] for token in described["added_tokens"]}
            path.write_text(json.dumps(described))
        return tmp_path / "model"

    return make


@pytest.mark.parametrize(
    ("name", "in_vocabulary"), [(LLAMA, False), (MISTRAL, True), (TEKKEN, True), ("<unused3>", False)]
)
def test_it_is_renamed_and_all_else_stays(name, in_vocabulary, with_token, tmp_path):
    directory = with_token(name, in_vocabulary)
    stock = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    marker = stock.token_to_id(name)
    assert marker_id(tokenizer, "<extra_0>") == marker and marker_origin(tokenizer) == name
    assert tokenizer.backend_tokenizer.get_vocab_size() == stock.get_vocab_size()
    for text in ("x 12 three+two<|solution|>\n\n", "start=three+two-four, so\n\n answer", "a<extra_0"):
        assert tokenizer.encode(text, add_special_tokens=False) == stock.encode(text, add_special_tokens=False).ids
    config = EncodingConfig(marker="auto", system_prompt="")
    assert config.marker == "<extra_0>"
    encoded = Encoder(tokenizer, config).encode(f"q {name} <extra_0>", [f"a {name}", "<extra_0>"])
    assert np.flatnonzero(encoded.tokens == marker).tolist() == encoded.step_positions.tolist()
    save_tokenizer(tokenizer, tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert marker_id(again, "<extra_0>") == marker and marker_origin(again) == name
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert theirs.encode("<extra_0>", add_special_tokens=False) == [marker]


def test_a_named_marker_renames_nothing(with_token):
    directory = with_token(LLAMA)
    with pytest.raises(UserError, match="--marker='<step>' is not exactly one token of the tokenizer in"):
        load_tokenizer(directory, "<step>")
    assert marker_origin(load_tokenizer(directory, LLAMA)) is None


def test_without_a_token_in_reserve_it_is_refused(with_token):
    refused = r"'<extra_0>' is not exactly one token .*it has no reserved token to rename.*docs/encodings.md#marker"
    with pytest.raises(UserError, match=refused):
        load_tokenizer(with_token("<|other|>"))


def test_tokens_with_a_role_are_not_taken():
    names = ["<s>", "[control_9]", "<|reserved_special_token_2|>", "<|reserved_special_token_0|>", "[control_8]"]
    described = {"added_tokens": [{"id": 9 - i, "content": name} for i, name in enumerate(names)]}
    assert reserved_token(described, {}, "") == LLAMA
    assert reserved_token(described, {"pad_token": LLAMA}, "") == "<|reserved_special_token_2|>"
    assert reserved_token(described, {"pad_token": {"content": LLAMA}}, "") == "<|reserved_special_token_2|>"
    assert reserved_token(described, {}, f"{names[2]}{names[3]}") == "[control_8]"
    quad = {"added_tokens": [*described["added_tokens"], {"id": 151651, "content": "<|quad_end|>"}]}
    assert reserved_token(quad, {}, "") == "<|quad_end|>"
    quad["added_tokens"][-1]["id"] = 7
    assert reserved_token(quad, {}, "") == LLAMA
    assert reserved_token({}, {}, "") is None
