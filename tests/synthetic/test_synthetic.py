"""What materialise writes: files that every reader here takes, the same for the same seed."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest
import transformers

from cfprm_jax import synthetic
from cfprm_jax.config import MARKER, EncodingConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.encoding import Encoder, load_tokenizer
from cfprm_jax.data.formats import read
from cfprm_jax.huggingface import loading
from cfprm_jax.synthetic.tokenizer import make_tokenizer, words

SMALL = synthetic.WorldConfig(
    train_problems=60, held_out_problems=80, solutions_per_problem=4, candidates_per_problem=32
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, SMALL)


def content(files):
    paths = [files.train, files.held_out, files.candidates, *sorted(files.model.iterdir())]
    return {path.name: path.read_bytes() for path in paths}


def test_the_seed_decides(files, tmp_path):
    again = content(synthetic.materialise(tmp_path / "again", 0, SMALL))
    assert again == content(files)
    other = content(synthetic.materialise(tmp_path / "other", 1, SMALL))
    assert {name for name in again if again[name] != other[name]} == {
        "train.jsonl",
        "held_out.jsonl",
        "candidates.jsonl",
    }


def test_readers_take_the_files_and_problems_are_disjoint(files):
    train, held_out = list(read(files.train)), list(read(files.held_out))
    assert (len(train), len(held_out)) == (240, 320)
    records = [list(group) for _, group in itertools.groupby(train, key=lambda trajectory: trajectory.source)]
    assert len(records) == 60 and {len(record) for record in records} == {4}
    questions = {trajectory.question for trajectory in held_out}
    assert not questions & {trajectory.question for trajectory in train}
    assert {question.question for question in read_candidates(files.candidates)} == questions
    labels = np.concatenate([trajectory.labels for trajectory in train])
    assert set(labels) == {0.0, 1.0} and 0.2 < labels.mean() < 0.8


def test_most_solutions_to_train_on_end_at_their_first_mistake(files):
    wrong = [t for t in read(files.train) if 0.0 in t.labels]
    ended = [t for t in wrong if list(t.labels).index(0.0) == len(t.labels) - 1]
    assert 0.6 < len(ended) / len(wrong) < 0.95
    assert any(t.labels[-1] == 1.0 for t in wrong), "some recover"


def test_there_is_room_for_a_reward_model(files):
    right, majority, oracle = [], [], []
    for question in read_candidates(files.candidates):
        answers = [candidate.predicted for candidate in question.candidates]
        assert len(answers) == 32
        assert [candidate.correct for candidate in question.candidates] == [a == question.answer for a in answers]
        assert [candidate.steps[-1] for candidate in question.candidates] == [f"answer={a}" for a in answers]
        right.append(answers.count(question.answer) / 32)
        majority.append(collections.Counter(answers).most_common(1)[0][0] == question.answer)
        oracle.append(question.answer in answers)
    assert 0.35 < np.mean(right) < 0.65
    assert np.mean(majority) < 0.7
    assert np.mean(oracle) > 0.95


def test_every_word_is_one_token_and_other_text_is_lossless(files):
    tokenizer = load_tokenizer(files.model)
    for word in words():
        (token,) = tokenizer(word, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode([token]) == word
    for text in ("Was ist 2 + 2? Ünïcode", "start=three+two  \n\n\n so"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids(MARKER) == tokenizer(MARKER)["input_ids"][0]
    assert tokenizer.pad_token_id == 0


def test_the_tokenizer_is_the_same_through_every_class(files):
    auto = transformers.AutoTokenizer.from_pretrained(str(files.model))
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(str(files.model))
    made = make_tokenizer()
    for text in ("start=three+two-four", "three+two=five again\n\nso=five", "x1 = 3.5"):
        assert auto(text)["input_ids"] == plain(text)["input_ids"] == made(text)["input_ids"]


def test_encoding_is_a_token_a_word(files):
    encoder = Encoder(load_tokenizer(files.model), EncodingConfig(system_prompt="", max_length=64))
    encoded = encoder.encode("start=three+two-four", ["three+two=five\n\nso=five", "five-four=one", "answer=one"])
    tokens = encoder._tokenizer.convert_ids_to_tokens(encoded.tokens)
    assert tokens == [
        *("<|user|>", "start", "=three", "+two", "-four", "<|solution|>"),
        *("three", "+two", "=five", "ĊĊ", "so", "=five", MARKER),
        *("five", "-four", "=one", MARKER, "answer", "=one", MARKER),
    ]


def test_the_configuration_is_a_small_qwen2(files):
    config, raw = loading.read_config(files.model)
    assert config.vocab_size == len(load_tokenizer(files.model)) == raw["vocab_size"]
    assert transformers.AutoConfig.from_pretrained(str(files.model)).model_type == "qwen2"
    assert json.loads((files.model / "config.json").read_text()) == raw


def test_problems_have_one_bias_in_all_their_solutions(tmp_path):
    sure = dataclasses.replace(
        SMALL, slip_rate=0.0, train_slip_rate=0.0, bias_rate=1.0, min_bias=1.0, max_bias=1.0, review_rate=0.0
    )
    files = synthetic.materialise(tmp_path, 0, sure)
    answers = {q.question: {c.predicted for c in q.candidates} for q in read_candidates(files.candidates)}
    assert all(len(given) == 1 for given in answers.values())
    labelled = {
        t.question: t.steps[-1].removeprefix("answer=") for t in read(files.held_out) if "answer" in t.steps[-1]
    }
    assert labelled and all({answer} == answers[question] for question, answer in labelled.items())
