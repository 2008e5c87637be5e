"""The tokenizer of a directory: read as tokenizer.json has it, and refused when its texts have no ids of their own."""

from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
import transformers

from cfprm_jax import synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.tokenizer_files import load_tokenizer, marker_id, render_chat, save_tokenizer

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=1, candidates_per_problem=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory of a Qwen2 model without weights: config.json, tokenizer.json, tokenizer_config.json."""
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD).model


@pytest.fixture
def directory(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


def rewrite(path, change):
    described = json.loads(path.read_text())
    change(described)
    path.write_text(json.dumps(described))


def error_of(directory, **options):
    with pytest.raises(UserError) as error:
        load_tokenizer(directory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_a_tokenizer_json_nothing_is_made_up(directory):
    (directory / "tokenizer.json").unlink()
    assert error_of(directory) == (
        f"{directory}: no tokenizer: expected tokenizer.json (or vocab.json and merges.txt, or tokenizer.model)"
    )


def test_vocab_json_and_merges_txt_make_one(directory, model):
    described = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in described["model"]["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    # Tokens beside the vocabulary are declared in tokenizer_config.json then.
    declared = {str(token.pop("id")): token for token in described["added_tokens"]}
    rewrite(directory / "tokenizer_config.json", lambda config: config.update(added_tokens_decoder=declared))
    text = "start=three+two-four, so\n\n answer"
    made, whole = load_tokenizer(directory), load_tokenizer(model)
    assert made.encode(text) == whole.encode(text) and marker_id(made, "<extra_0>") == marker_id(whole, "<extra_0>")
    (directory / "vocab.json").write_text("[1, 2]")
    assert "vocab.json: expected a JSON object, found a list" in error_of(directory)


def test_a_marker_that_only_tokenizer_json_has(directory):
    """As added by hand: tokenizer_config.json's added_tokens_decoder does not know it."""

    def rename(value):
        return json.loads(json.dumps(value).replace("<extra_0>", "<|here|>"))

    described = rename(json.loads((directory / "tokenizer.json").read_text()))
    (directory / "tokenizer.json").write_text(json.dumps(described))
    found = [token["id"] for token in described["added_tokens"] if token["content"] == "<|here|>"]
    for change in (
        lambda config: config.pop("added_tokens_decoder", None),
        lambda config: config.pop("extra_special_tokens", None),
        lambda config: config.update(tokenizer_class="Qwen2Tokenizer"),
    ):
        rewrite(directory / "tokenizer_config.json", change)
        tokenizer = load_tokenizer(directory, "<|here|>")
        assert [marker_id(tokenizer, "<|here|>")] == found
        encoder = Encoder(tokenizer, EncodingConfig(marker="<|here|>", system_prompt=""))
        assert encoder.encode("q", ["a"]).tokens[-1] == found[0]


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "LlamaTokenizer", "GPT2Tokenizer", "BertTokenizer", "None", None])
def test_the_class_that_is_named_changes_no_token(name, directory, model, tmp_path):
    """A tokenizer that cuts text otherwise than Qwen2's, which transformers 5 rebuilds by its class."""
    rewrite(
        directory / "tokenizer.json",
        lambda described: described.update(
            pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        ),
    )
    rewrite(directory / "tokenizer_config.json", lambda config: config.update(tokenizer_class=name))
    text = "x 12 three+two<|solution|>\n\n"
    expected = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    # What a run or an export writes is read the same, beside config.json or without.
    for beside in (True, False):
        out = tmp_path / f"out{beside}"
        out.mkdir()
        if beside:
            shutil.copy(model / "config.json", out)
        save_tokenizer(tokenizer, out)
        assert load_tokenizer(out).encode(text, add_special_tokens=False) == expected
        assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "outFalse"))
    assert theirs.encode(text, add_special_tokens=False) == expected


def without(described, *names):
    for name in names:
        index = described["model"]["vocab"].pop(name)
        described["model"]["merges"] = [m for m in described["model"]["merges"] if name not in m]
    return index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("model"), "tokenizer.json: model: expected an object, found nothing"),
        (lambda d: d.update(model=3), "tokenizer.json: model: expected an object, found 3"),
        (lambda d: d["model"].update(vocab=["a", "b"]), "tokenizer.json: model.vocab[0]: expected a list of 2"),
        (lambda d: d["model"].update(vocab=None), "tokenizer.json: model.vocab: expected an object or a list"),
        (
            lambda d: d["model"]["vocab"].update(a=-1),
            "model.vocab.a: expected a whole number from 0 up to 2,147,483,647",
        ),
        (lambda d: d["model"]["vocab"].update(a="7"), "model.vocab.a: expected a whole number from 0 up to"),
        (lambda d: d["model"]["vocab"].update(a=10**6), "has a token 1000000, but the model's vocab_size is"),
        (lambda d: d["model"]["vocab"].update(a=d["model"]["vocab"]["b"]), "have the same id"),
        (lambda d: without(d, "7"), "the tokenizer makes no token of '7', so scores would not depend on it"),
        (lambda d: d["model"].update(merges=[["a", "zzzz"]]), "has no tokenizer that loads"),
        (lambda d: d["added_tokens"][0].pop("content"), "added_tokens[0].content: expected a text that is not empty"),
        (lambda d: d["added_tokens"][0].update(content=["x"]), "added_tokens[0].content: expected a text that is not"),
        (lambda d: d["added_tokens"][0].update(id=5), "added_tokens: '<|endoftext|>' has id 5, expected 0"),
        (lambda d: d["added_tokens"][0].update(id=-5), "added_tokens[0].id: expected a whole number from 0"),
        (lambda d: d.update(added_tokens=7), "added_tokens: expected a list"),
        (lambda d: d.update(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}), "no token of"),
        (lambda d: d.update(normalizer={"type": "Lowercase"}), "makes the same tokens"),
        (lambda d: d.update(pre_tokenizer={"type": "Unheard"}), "has no tokenizer that loads"),
        (
            lambda d: d.update(added_tokens=[t for t in d["added_tokens"] if t["content"] != "<extra_0>"]),
            "is not exactly one token",
        ),
    ],
)
def test_tokenizers_that_are_none(change, message, directory):
    rewrite(directory / "tokenizer.json", change)
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    assert message in error_of(directory, vocab_size=size)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{}"])
def test_a_tokenizer_json_of_another_kind(text, directory):
    (directory / "tokenizer.json").write_text(text)
    assert "tokenizer.json: " in error_of(directory)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer_config.json", lambda d: d.update(chat_template=3), "chat_template: expected a text or a list"),
        ("tokenizer_config.json", lambda d: d.update(chat_template={"a": "b"}), "chat_template: expected a text or a"),
        ("tokenizer_config.json", lambda d: d.update(chat_template=[{"name": "x"}]), "chat_template[0].template: "),
        ("tokenizer_config.json", lambda d: d.update(eos_token=[1]), "eos_token: expected a text, of up to 10,000"),
        (
            "tokenizer_config.json",
            lambda d: d.update(added_tokens_decoder=[]),
            "added_tokens_decoder: expected an object",
        ),
        (
            "tokenizer_config.json",
            lambda d: d.update(added_tokens_decoder={"9": {"content": "<extra_0>"}}),
            "added_tokens_decoder: '<extra_0>' has id 9, but ",
        ),
        (
            "tokenizer_config.json",
            lambda d: d.update(chat_template="{{ messages[0].role }}"),
            "does not show the question",
        ),
        ("tokenizer_config.json", lambda d: d.update(chat_template="{{ 1 / 0 }}"), "fails: ZeroDivisionError"),
        ("tokenizer_config.json", lambda d: d.update(chat_template="{% include 'x' %}"), "include needs another file"),
        (
            "tokenizer_config.json",
            lambda d: d.update(chat_template="{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3),
            "fails: it computes too much",
        ),
    ],
)
def test_files_beside_it(name, change, message, directory):
    rewrite(directory / name, change)
    text = error_of(directory)
    assert message in text and str(directory) in text


def test_other_files_beside_it(directory):
    (directory / "special_tokens_map.json").write_text('{"eos_token": 3}')
    assert "special_tokens_map.json: eos_token: expected a text" in error_of(directory)
    (directory / "special_tokens_map.json").unlink()
    (directory / "added_tokens.json").write_text("[]")
    assert "added_tokens.json: expected a JSON object, found a list" in error_of(directory)
    (directory / "added_tokens.json").unlink()
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja: not UTF-8" in error_of(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    assert render_chat(load_tokenizer(directory), [{"role": "user", "content": "a"}], True) == "a!"


def test_several_templates_have_a_default(directory):
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ messages[0]['content'] }}?"}]
    rewrite(directory / "tokenizer_config.json", lambda d: d.update(chat_template=named))
    assert render_chat(load_tokenizer(directory), [{"role": "user", "content": "a"}], True) == "a?"
    rewrite(directory / "tokenizer_config.json", lambda d: d.update(chat_template=named[:1]))
    assert "expected a text, found none" in error_of(directory)


def test_without_a_marker_the_tokenizer_is_taken_as_it_is(directory):
    rewrite(directory / "tokenizer_config.json", lambda d: d.pop("chat_template"))
    assert load_tokenizer(directory, None).encode("three")
    assert 'no "chat_template"' in error_of(directory)
