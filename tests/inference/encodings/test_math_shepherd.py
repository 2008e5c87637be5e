"""Math-Shepherd's encoding, on small causal models; the published one is a Mistral."""

from __future__ import annotations

import numpy as np
import pytest
from encoding_fixtures import QUESTION, SHEPHERD_CARD, SOLUTIONS

import cfprm_jax
from cfprm_jax.errors import UserError


def theirs(torch, model, tokenizer, ids_of, steps):
    """P('+') at each tag of the whole text, tags that stand in the question or a step left out."""
    text, ends = f"{QUESTION} ", []
    for number, step in enumerate(steps, 1):
        text += ("\n" if number > 1 else "") + f"Step {number}: {step} ки"
        ends.append(len(text))
    ids = ids_of(tokenizer, text, add_special_tokens=True)
    tag = ids_of(tokenizer, "ки")[-1]
    signs = ids_of(tokenizer, "+ -")
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0][:, signs].softmax(-1)[:, 0]
    found = scores[torch.tensor(ids) == tag].tolist()
    assert len(found) == len(steps) + QUESTION.count("ки")
    return found[QUESTION.count("ки") :]


@pytest.mark.parametrize(("body", "tied", "adds_bos"), [("Mistral", False, True), ("Llama", True, False)])
def test_scores_are_those_of_the_model_cards_program(
    torch, make_reference, write_tokenizer, ids_of, scored, tmp_path, body, tied, adds_bos
):
    tokenizer = write_tokenizer(tmp_path, "<s>", ("ки", " -"), adds_bos)
    model = make_reference(f"{body}ForCausalLM", vocab_size=300, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(SHEPHERD_CARD, encoding="utf-8")
    expected = [theirs(torch, model, tokenizer, ids_of, steps) for steps in SOLUTIONS]
    assert np.concatenate(expected).std() > 0.05
    for one, other in zip(scored(tmp_path), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_steps_that_have_their_number_and_tag_keep_them(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path, words=("ки", " -"))
    make_reference("Qwen2ForCausalLM", vocab_size=300).save_pretrained(tmp_path)
    prm = cfprm_jax.load(tmp_path, "float32", encoding="math_shepherd")
    plain = prm.score("q", ["a", "b"])
    assert prm.score("q", ["Step 1: a ки", " step 2: b ки\n"])[0] == plain[0]
    assert prm.score("q", ["Step 1: a", "Step 2: b ки"]) == plain


def test_a_tokenizer_without_the_tag_is_refused(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path, words=(" -",))
    make_reference("Qwen2ForCausalLM", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"gives 'ки' the ids .* expected exactly one"):
        cfprm_jax.load(tmp_path, encoding="math_shepherd")


def test_two_signs_that_are_more_than_two_tokens_are_refused(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path)
    make_reference("Qwen2ForCausalLM", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"gives '\+ -' the ids .* expected two"):
        cfprm_jax.load(tmp_path, encoding="math_shepherd")
