"""Skywork's encoding: a value head, and a newline token after every line."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from encoding_fixtures import QUESTION, SOLUTIONS, TEMPLATE

import cfprm_jax
from cfprm_jax.errors import UserError
from cfprm_jax.inference.load import open_prm
from cfprm_jax.inference.scorer import Scorer

TEXT = "\n\nLet us add.\n\n1+1 = 2\n \nSo the answer is 2.\n"


def write(directory, make_reference, seed=0, body="Qwen2"):
    """A causal model with v_head.summary beside it; the model, and the head's weights."""
    model = make_reference(f"{body}ForCausalLM", vocab_size=300, tie_word_embeddings=False)
    model.save_pretrained(directory)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    generator = np.random.default_rng(seed)
    # Logits near 0, where a float32 score has all its digits.
    head = tuple(0.2 * generator.standard_normal(shape, np.float32) for shape in ((1, 56), (1,)))
    tensors |= {"v_head.summary.weight": head[0], "v_head.summary.bias": head[1]}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return model, head


def theirs(torch, model, head, tokenizer, ids_of, response):
    """(score, line) after every line of a response, as the published program reads one."""
    ids = [tokenizer.bos_token_id, *ids_of(tokenizer, QUESTION + "\n")]
    flags = []
    lines = response.split("\n")
    for line in lines:
        ids += (ids_of(tokenizer, line) if line else []) + [ids_of(tokenizer, "\n")[-1]]
        flags.append(len(ids) - 1)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        scores = (hidden @ torch.tensor(head[0][0]) + head[1][0]).sigmoid()
    return list(zip(scores[flags].tolist(), lines, strict=True))


@pytest.mark.parametrize("body", ["Llama", "Mistral"])
def test_scores_are_those_at_each_steps_last_newline(
    torch, make_reference, write_tokenizer, ids_of, scored, tmp_path, body
):
    tokenizer = write_tokenizer(tmp_path, "<s>")
    model, head = write(tmp_path, make_reference, body=body)
    expected = []
    for steps in SOLUTIONS:
        scores = [score for score, _ in theirs(torch, model, head, tokenizer, ids_of, "\n".join(steps))]
        expected.append([scores[i - 1] for i in np.cumsum([step.count("\n") + 1 for step in steps])])
    assert np.concatenate(expected).std() > 0.05
    for one, other in zip(scored(tmp_path), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_text_is_read_as_it_is(torch, make_reference, write_tokenizer, ids_of, tmp_path):
    """Its blank lines keep their newline tokens; a line is scored after those that follow it."""
    tokenizer = write_tokenizer(tmp_path, "<s>")
    model, head = write(tmp_path, make_reference)
    scorer = Scorer(open_prm(tmp_path, "float32"))
    steps = scorer.encoder.split(TEXT)
    assert steps == ["\n\nLet us add.\n", "1+1 = 2\n ", "So the answer is 2.\n"] and "\n".join(steps) == TEXT
    assert scorer.encoder.split("\n \n") == []
    scores = [score for score, _ in theirs(torch, model, head, tokenizer, ids_of, TEXT)]
    (logits,) = scorer.score([(QUESTION, steps)])
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), [scores[3], scores[5], scores[7]], atol=1e-5)


def test_what_skywork_needs_is_named(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path)
    write(tmp_path, make_reference)
    with pytest.raises(UserError, match="has no bos_token"):
        cfprm_jax.load(tmp_path).score("q", ["a"])
    with pytest.raises(UserError, match=r"--step_separator=ab, but .* skywork"):
        cfprm_jax.load(tmp_path, step_separator="ab")


@pytest.mark.parametrize(("stored", "expected"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_float32_value_head_does_not_decide_the_dtype(make_reference, write_tokenizer, tmp_path, stored, expected):
    """As published, a bfloat16 backbone has a float32 v_head, which the computation keeps in float32 anyway."""
    write_tokenizer(tmp_path, "<s>")
    write(tmp_path, make_reference)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    kind = ml_dtypes.bfloat16 if stored == "bfloat16" else np.float32
    tensors = {name: v if name.startswith("v_head.") else v.astype(kind) for name, v in tensors.items()}
    tensors["lm_head.bias"] = np.zeros(300, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = open_prm(tmp_path)
    assert loaded.config.dtype == expected and loaded.params["head"]["output"]["kernel"].dtype == np.float32


@pytest.mark.parametrize("encoding", ["skywork", "math_shepherd", "rlhflow"])
def test_a_damaged_file_is_named_and_not_a_head_that_is_missing(make_reference, write_tokenizer, tmp_path, encoding):
    write_tokenizer(tmp_path, "<s>", ("ки", " -"), chat_template=TEMPLATE)
    write(tmp_path, make_reference)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    for name in (encoding, "auto"):
        with pytest.raises(UserError, match=r"model\.safetensors: truncated"):
            open_prm(tmp_path, encoding=name)
