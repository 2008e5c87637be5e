"""Detection of a directory's encoding from its own files, without guessing."""

from __future__ import annotations

import json

import pytest
import safetensors.numpy
from encoding_fixtures import RLHFLOW_CARD as RLHFLOW
from encoding_fixtures import SHEPHERD_CARD as SHEPHERD

import cfprm_jax
from cfprm_jax.errors import UserError
from cfprm_jax.inference.load import encoding_of


@pytest.mark.parametrize(
    ("class_name", "architecture", "special", "card"),
    [
        ("Qwen2ForTokenClassification", None, (), ""),
        ("Qwen2ForTokenClassification", None, ("<extra_0>",), ""),
        ("Qwen2ForTokenClassification", "Qwen2ForProcessRewardModel", (), ""),
        ("Qwen2ForTokenClassification", None, (), SHEPHERD + RLHFLOW),
        ("Qwen2ForSequenceClassification", None, ("<extra_0>",), ""),
        ("Qwen2ForSequenceClassification", "Qwen2ForRewardModel", (), ""),
    ],
)
def test_a_head_without_a_description_is_refused_in_one_line(
    make_reference, write_tokenizer, tmp_path, class_name, architecture, special, card
):
    """Outcome reward models and PRMs of unknown origin."""
    write_tokenizer(tmp_path, special=special)
    make_reference(class_name, vocab_size=300, num_labels=2).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(card, encoding="utf-8")
    if architecture:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [architecture]}))
    with pytest.raises(UserError, match="does not record its encoding") as refused:
        encoding_of(tmp_path)
    assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)


def test_each_published_prm_is_known_by_its_files(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path, special=("<extra_0>",))
    make_reference("Qwen2ForCausalLM", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="it is a language model, not a process reward model"):
        encoding_of(tmp_path)
    for card, name in ((SHEPHERD, "math_shepherd"), (RLHFLOW, "rlhflow")):
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
        assert encoding_of(tmp_path).name == name
    (tmp_path / "README.md").write_text(RLHFLOW.replace("process", "outcome"))
    with pytest.raises(UserError, match="it is a language model"):
        encoding_of(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    value = {"v_head.summary.weight": tensors["model.norm.weight"][None]}
    safetensors.numpy.save_file(tensors | value, tmp_path / "model.safetensors")
    assert encoding_of(tmp_path).name == "skywork"
    score = {"score.weight": tensors["model.norm.weight"][None], "score.bias": tensors["model.norm.weight"][:1]}
    safetensors.numpy.save_file(tensors | score, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen2ForProcessRewardModel"]}))
    assert encoding_of(tmp_path).name == "qwen_prm"


@pytest.mark.parametrize(
    ("encoding", "class_name", "message"),
    [
        ("trl", "Qwen2ForCausalLM", "has no reward head"),
        ("rlhflow", "Qwen2ForTokenClassification", "has a reward head"),
        ("math_shepherd", "Qwen2Model", "has no language-model head"),
        ("skywork", "Qwen2ForTokenClassification", "has no value head"),
    ],
)
def test_a_named_encoding_whose_head_is_not_there_is_refused(
    make_reference, write_tokenizer, tmp_path, encoding, class_name, message
):
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    write_tokenizer(tmp_path, "<s>", ("ки", " -"), chat_template=template)
    make_reference(class_name, vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        cfprm_jax.load(tmp_path, encoding=encoding)
