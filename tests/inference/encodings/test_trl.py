"""PRMs of TRL's trainer: read as it trains them."""

from __future__ import annotations

import numpy as np
import pytest
from encoding_fixtures import QUESTION, SOLUTIONS

import cfprm_jax
from cfprm_jax.errors import UserError


def theirs(torch, model, tokenizer, separator, ids_of):
    """P(label 1) at the last separator token of each step; every text is tokenised alone, as by tokenize_row."""
    found = []
    for steps in SOLUTIONS:
        ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        ids += ids_of(tokenizer, QUESTION)
        places = []
        for step in steps:
            ids += ids_of(tokenizer, step) + ids_of(tokenizer, separator)
            places.append(len(ids) - 1)
        with torch.no_grad():
            probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)[:, 1]
        found.append(probabilities[places].tolist())
    return found


@pytest.mark.parametrize(("bos", "flag", "separator"), [(None, "", "\n"), ("<s>", "\\n\\n", "\n\n")])
def test_scores_are_those_of_what_trl_trains(
    torch, make_reference, write_tokenizer, ids_of, scored, tmp_path, bos, flag, separator
):
    tokenizer = write_tokenizer(tmp_path, bos)
    model = make_reference(vocab_size=300, num_labels=2)
    model.save_pretrained(tmp_path)
    expected = theirs(torch, model, tokenizer, separator, ids_of)
    assert np.concatenate(expected).std() > 0.05
    found = scored(tmp_path, encoding="trl", step_separator=flag)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    prm = cfprm_jax.load(tmp_path, "float32", encoding="trl", step_separator=flag)
    np.testing.assert_allclose(prm.score(QUESTION, SOLUTIONS[0]), expected[0], atol=1e-5)


def test_what_trl_wrote_is_refused_without_its_name(make_reference, write_tokenizer, tmp_path):
    """Of a stock Qwen2.5 tokenizer, too, whose unused token could be renamed to the marker."""
    write_tokenizer(tmp_path, special=["<|quad_end|>"], chat_template="{{ messages[0]['content'] }}")
    make_reference(vocab_size=300, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does not record its encoding .* --encoding=cfprm\|qwen_prm\|trl"):
        cfprm_jax.load(tmp_path)


def test_a_separator_without_tokens_is_refused(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path)
    make_reference(vocab_size=300, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="unknown escape"):
        cfprm_jax.load(tmp_path, encoding="trl", step_separator="\\x")


def test_too_long_is_not_scored_in_part(make_reference, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path)
    make_reference(vocab_size=300, num_labels=2, max_position_embeddings=32).save_pretrained(tmp_path)
    prm = cfprm_jax.load(tmp_path, "float32", encoding="trl")
    assert len(prm.score("ab", ["c", "d"])) == 2
    with pytest.raises(UserError, match="longer than 32 tokens"):
        prm.score("ab", ["c" * 31])
