"""Encoding: prompt, steps, markers, truncation, and that text never becomes a special token."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cfprm_jax.config import QWEN_MARKER_ID, EncodingConfig
from cfprm_jax.data.encoding import Encoder, load_tokenizer, save_tokenizer
from cfprm_jax.errors import UserError

SYSTEM = "Be brief."
CONFIG = EncodingConfig(system_prompt=SYSTEM, max_length=400)
SPECIAL = ("<extra_0>", "<|start|>", "<|end|>", "<|pad|>")

texts = st.text(alphabet="abthe .\n<>|é😀0_xrsdn", max_size=20)
texts_with_special = st.lists(st.one_of(texts, st.sampled_from(SPECIAL)), max_size=4).map("".join)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer, CONFIG)


def rendered(question: str) -> str:
    """The chat template of tests/data/conftest.py, written out."""
    return f"<|start|>system\n{SYSTEM}<|end|>\n<|start|>user\n{question}<|end|>\n<|start|>assistant\n"


def test_the_layout_is_prompt_then_each_step_and_its_marker(tokenizer, encoder):
    marker = tokenizer.convert_tokens_to_ids("<extra_0>")
    encoded = encoder.encode("What is 1+1?", ["First the sum.", "It is 2.\n\n"], [1.0, 0.25])

    plain = [tokenizer.encode(text, add_special_tokens=False) for text in ("First the sum.", "It is 2.\n\n")]
    prompt = tokenizer.encode(rendered("What is 1+1?"), add_special_tokens=False)
    assert encoded.tokens.tolist() == [*prompt, *plain[0], marker, *plain[1], marker]
    assert encoded.step_positions.tolist() == [len(prompt) + len(plain[0]), len(encoded.tokens) - 1]
    assert encoded.labels.tolist() == [1.0, 0.25]
    assert encoded.steps_cut == 0
    assert (encoded.tokens.dtype, encoded.step_positions.dtype, encoded.labels.dtype) == ("int32", "int32", "float32")


def test_steps_are_tokenised_each_on_its_own(tokenizer, encoder):
    """Joined with what follows, ".\\n\\n" would be one token across the end of the step."""
    apart = encoder.encode("q", ["a.", "\n\nb"]).tokens
    merged = tokenizer.convert_tokens_to_ids(".ĊĊ")
    assert merged in encoder.encode("q", ["a.\n\nb"]).tokens
    assert merged not in apart


@settings(max_examples=60)
@given(texts)
def test_a_prompt_without_special_text_is_the_whole_template_tokenised(tokenizer, encoder, question):
    # hypothesis also tries strings that it finds in the package's source.
    assume(not any(token in question for token in SPECIAL))
    prompt = tokenizer.encode(rendered(question), add_special_tokens=False)
    assert encoder.encode(question, ["s"]).tokens.tolist()[: len(prompt)] == prompt


@settings(max_examples=60)
@given(texts_with_special, st.lists(texts_with_special, min_size=1, max_size=4))
def test_text_never_becomes_a_special_token(tokenizer, encoder, question, steps):
    encoded = encoder.encode(question, steps)
    special = [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL]
    marker, start, end, pad = (int((encoded.tokens == token).sum()) for token in special)
    kept = len(encoded.step_positions)
    assert (marker, start, end, pad) == (kept, 3, 2, 0)
    assert (encoded.tokens[encoded.step_positions] == encoder.marker_id).all()
    # Every byte is still there: decoding gives the texts back, with the marker at each step's end.
    expected = rendered(question) + "".join(f"{step}<extra_0>" for step in steps[:kept])
    assert tokenizer.decode(encoded.tokens) == expected


def test_an_ordinary_added_token_is_found_in_text_as_in_the_whole_template(tokenizer, encoder):
    tool = tokenizer.convert_tokens_to_ids("<tool>")
    assert tool in encoder.encode("call <tool>", ["s"]).tokens
    assert tool in encoder.encode("q", ["call <tool>"]).tokens


def test_a_marker_declared_an_ordinary_added_token_is_still_plain_text(tmp_path, make_tokenizer):
    directory = make_tokenizer(tmp_path, special=("<|start|>", "<|end|>"), added=("<extra_0>",))
    encoder = Encoder(load_tokenizer(directory), CONFIG)
    encoded = encoder.encode("<extra_0>?", ["a <extra_0>", "b"])
    assert (encoded.tokens == encoder.marker_id).sum() == 2


def test_whole_windows_are_cut_from_the_end_with_their_labels(tokenizer):
    steps, labels = ["aaaa", "bbbb", "cccc"], [0.5, np.nan, 1.0]
    whole = Encoder(tokenizer, CONFIG).encode("q", steps, labels)
    for length in range(len(whole.tokens) - 15, len(whole.tokens) + 1):
        cut = Encoder(tokenizer, EncodingConfig(system_prompt=SYSTEM, max_length=length)).encode("q", steps, labels)
        kept = int((whole.step_positions < length).sum())
        assert cut.steps_cut == 3 - kept
        np.testing.assert_array_equal(cut.step_positions, whole.step_positions[:kept])
        np.testing.assert_array_equal(cut.labels, whole.labels[:kept])
        end = whole.step_positions[kept - 1] + 1 if kept else whole.step_positions[0] - 4
        np.testing.assert_array_equal(cut.tokens, whole.tokens[:end])


def test_a_prompt_over_the_length_gives_nothing(tokenizer):
    encoded = Encoder(tokenizer, EncodingConfig(system_prompt=SYSTEM, max_length=8)).encode("q", ["a", "b"], [1, 0])
    assert (len(encoded.tokens), len(encoded.step_positions), len(encoded.labels), encoded.steps_cut) == (0, 0, 0, 2)


def test_without_labels_every_step_is_unlabelled(encoder):
    assert np.isnan(encoder.encode("q", ["a", "b"]).labels).all()


def test_another_number_of_labels_than_steps_is_an_error(encoder):
    with pytest.raises(UserError, match=r"3 steps but 2 labels for the question 'What'"):
        encoder.encode("What", ["a", "b", "c"], [1, 0])


@settings(max_examples=30)
@given(st.lists(st.tuples(texts_with_special, st.lists(texts, min_size=1, max_size=3)), max_size=5))
def test_many_at_once_are_the_same_as_each_alone(tokenizer, encoder, items):
    together = Encoder.encode_many(encoder, [(question, steps, [0.5] * len(steps)) for question, steps in items])
    for (question, steps), encoded in zip(items, together, strict=True):
        alone = encoder.encode(question, steps, [0.5] * len(steps))
        np.testing.assert_array_equal(encoded.tokens, alone.tokens)
        np.testing.assert_array_equal(encoded.step_positions, alone.step_positions)
        np.testing.assert_array_equal(encoded.labels, alone.labels)


def test_the_caches_are_bounded_and_change_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr("cfprm_jax.data.encoding._CACHE_ENTRIES", 2)
    encoder = Encoder(tokenizer, CONFIG)
    first = encoder.encode("q", ["a", "b", "c"]).tokens
    assert not encoder._windows
    np.testing.assert_array_equal(encoder.encode("q", ["a", "b", "c"]).tokens, first)


def test_split_cuts_at_the_separator_and_drops_empty_pieces(tokenizer):
    encoder = Encoder(tokenizer, CONFIG)
    assert encoder.split("a\n\nb\n\n\n\nc \n\n") == ["a", "b", "c "]
    assert encoder.split(" \n\n\t") == []
    assert Encoder(tokenizer, EncodingConfig(step_separator=r"\n")).split("a\nb") == ["a", "b"]
    with pytest.raises(UserError, match="--step_separator is empty"):
        Encoder(tokenizer, EncodingConfig(step_separator="")).split("a")


def test_an_empty_system_prompt_leaves_the_system_message_out(tokenizer):
    encoder = Encoder(tokenizer, EncodingConfig(system_prompt=""))
    assert tokenizer.decode(encoder.encode("q", []).tokens) == "<|start|>user\nq<|end|>\n<|start|>assistant\n"


def test_saved_and_loaded_again_it_encodes_the_same(tokenizer, encoder, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    again = Encoder(load_tokenizer(tmp_path), CONFIG)
    np.testing.assert_array_equal(again.encode("q <tool>", ["a b"]).tokens, encoder.encode("q <tool>", ["a b"]).tokens)
    assert transformers.AutoTokenizer.from_pretrained(str(tmp_path)).chat_template == tokenizer.chat_template


def test_prompts_need_no_marker(encoder, tmp_path, make_tokenizer):
    make_tokenizer(tmp_path, special=("<|pad|>", "<|start|>", "<|end|>"))
    prompts = Encoder(load_tokenizer(tmp_path, None), CONFIG, prompts_only=True)
    for question in ("q", "q <|end|> <extra_0>"):
        whole, found = (each.encode(question, []).tokens.tolist() for each in (encoder, prompts))
        assert encoder._tokenizer.decode(whole) == prompts._tokenizer.decode(found)
    with pytest.raises(ValueError, match="prompts only"):
        prompts.encode("q", ["a"])


class TestErrors:
    def test_a_marker_that_the_tokenizer_splits(self, tmp_path, make_tokenizer):
        make_tokenizer(tmp_path, special=("<|start|>", "<|end|>"))
        with pytest.raises(UserError, match=rf"--marker='<extra_0>' is not exactly one token .* in {tmp_path}"):
            load_tokenizer(tmp_path)

    def test_a_marker_that_is_an_ordinary_word(self, tmp_path, make_tokenizer):
        make_tokenizer(tmp_path, words=("zzz",))
        tokenizer = load_tokenizer(tmp_path, "zzz")
        with pytest.raises(UserError, match=r"--marker='zzz' is an ordinary word .*must be an added token"):
            Encoder(tokenizer, EncodingConfig(marker="zzz"))

    def test_no_chat_template(self, tmp_path, make_tokenizer):
        make_tokenizer(tmp_path, chat_template=None)
        with pytest.raises(UserError, match=rf'{tmp_path}/tokenizer_config.json: no "chat_template"'):
            load_tokenizer(tmp_path)

    def test_a_chat_template_without_the_question(self, tmp_path, make_tokenizer):
        make_tokenizer(tmp_path, chat_template="<|start|>{{ messages[0]['role'] }}")
        with pytest.raises(UserError, match="does not show the question"):
            Encoder(load_tokenizer(tmp_path), CONFIG)

    def test_a_chat_template_that_fails(self, tmp_path, make_tokenizer):
        make_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}")
        with pytest.raises(UserError, match="no system role"):
            Encoder(load_tokenizer(tmp_path), CONFIG)

    def test_no_directory(self, tmp_path):
        with pytest.raises(UserError, match="absent is not a directory"):
            load_tokenizer(tmp_path / "absent")

    def test_no_tokenizer_in_the_directory(self, tmp_path):
        with pytest.raises(
            UserError, match=re.escape(str(tmp_path)) + ": no tokenizer: expected tokenizer.json"
        ) as error:
            load_tokenizer(tmp_path)
        assert "\n" not in str(error.value)

    def test_a_token_without_an_embedding(self, tokenizer_dir):
        largest = max(load_tokenizer(tokenizer_dir).get_vocab().values())
        load_tokenizer(tokenizer_dir, vocab_size=largest + 1)
        with pytest.raises(UserError, match=f"has a token {largest}, but the model's vocab_size is {largest}"):
            load_tokenizer(tokenizer_dir, vocab_size=largest)

    def test_a_damaged_file(self, tmp_path, tokenizer_dir):
        shutil.copytree(tokenizer_dir, tmp_path, dirs_exist_ok=True)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(UserError, match=r"tokenizer.json: not readable as JSON"):
            load_tokenizer(tmp_path)


def test_another_marker_is_taken_by_name(tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir, "<|pad|>")
    encoder = Encoder(tokenizer, EncodingConfig(marker="<|pad|>"))
    assert encoder.encode("q", ["a"]).tokens[-1] == tokenizer.convert_tokens_to_ids("<|pad|>")


@pytest.fixture(scope="module")
def qwen_dir(shared):
    """The Qwen2.5 tokenizer as published, whose <|quad_end|> becomes the marker."""
    return shared / "data" / "tokenizers" / "qwen2.5"


@pytest.fixture(scope="module")
def qwen(qwen_dir):
    return load_tokenizer(qwen_dir)


def test_of_a_stock_qwen_tokenizer_the_unused_token_is_renamed_and_nothing_else_changes(qwen_dir, qwen, shared):
    stock = transformers.AutoTokenizer.from_pretrained(str(qwen_dir))
    assert qwen.encode("<extra_0>") == [QWEN_MARKER_ID]
    assert QWEN_MARKER_ID not in qwen.encode("<|quad_end|>")
    assert len(qwen) == len(stock)
    lines = (shared / "data" / "prm800k" / "original_samples.jsonl").read_text().splitlines()
    special = "<|im_start|>user\n<|vision_pad|><tool_call><|quad_start|> ки .\n\n$\n\n"
    for text in [*lines, special]:
        assert qwen.encode(text) == stock.encode(text)


def test_a_renamed_tokenizer_is_saved_with_the_marker(qwen, tmp_path):
    save_tokenizer(qwen, tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert again.encode("a<extra_0>") == [64, QWEN_MARKER_ID]
    assert again.chat_template == qwen.chat_template
    described = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert described.pop("marker_renamed_from") == "<|quad_end|>"
    assert "<|quad_end|>" not in json.dumps(described)
    names = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in names if token["id"] == QWEN_MARKER_ID] == ["<extra_0>"]


def test_a_qwen_tokenizer_encodes_with_its_published_template(qwen):
    encoder = Encoder(qwen, EncodingConfig())
    encoded = encoder.encode("What is 1+1? <extra_0>", ["One.", "Two <|im_end|>."], [1, 0])
    assert qwen.decode(encoded.tokens) == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1? <extra_0><|im_end|>\n<|im_start|>assistant\n"
        "One.<extra_0>Two <|im_end|>.<extra_0>"
    )
    assert np.flatnonzero(encoded.tokens == QWEN_MARKER_ID).tolist() == encoded.step_positions.tolist()
    assert (encoded.tokens == 151645).sum() == 2  # <|im_end|> of the system prompt and of the question
