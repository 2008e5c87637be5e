"""RLHFlow's encoding, on small causal models; the published ones are Llama 3.1.

The reference runs one conversation for each step, as its own program does.
"""

from __future__ import annotations

import numpy as np
import pytest
from encoding_fixtures import QUESTION, RLHFLOW_CARD, SOLUTIONS, TEMPLATE

import cfprm_jax
from cfprm_jax.errors import UserError


def rendered(tokenizer, ids_of, steps):
    """The ids of the conversation, special tokens being those of the template alone."""
    ids = []
    for number, step in enumerate(steps):
        turn = (f"{QUESTION} {step}" if number == 0 else step).strip()
        for role, content in (("user", turn), ("assistant", "+")):
            ids.append(tokenizer.convert_tokens_to_ids("<|start|>"))
            ids += ids_of(tokenizer, f"{role}\n\n{content}")
            ids.append(tokenizer.convert_tokens_to_ids("<|end|>"))
    return ids


@pytest.mark.parametrize(("body", "tied"), [("Llama", False), ("Mistral", True)])
def test_scores_are_those_of_one_conversation_a_step(
    torch, make_reference, write_tokenizer, ids_of, scored, tmp_path, body, tied
):
    tokenizer = write_tokenizer(tmp_path, chat_template=TEMPLATE)
    model = make_reference(f"{body}ForCausalLM", vocab_size=300, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(RLHFLOW_CARD)
    signs = [tokenizer.encode(sign)[-1] for sign in "+-"]
    expected = []
    for steps in SOLUTIONS:
        expected.append([])
        for count in range(1, len(steps) + 1):
            ids = rendered(tokenizer, ids_of, steps[:count])
            assert ids[-2:] == [signs[0], tokenizer.convert_tokens_to_ids("<|end|>")]
            with torch.no_grad():  # the answer before the last two tokens is predicted by the third from the end
                expected[-1].append(model(torch.tensor([ids])).logits[0, -3, signs].softmax(-1)[0].item())
    assert np.concatenate(expected).std() > 0.01
    for one, other in zip(scored(tmp_path), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ messages[0].content }}", "does not show turns"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "has no special token between"),
        (
            "{% for m in messages %}<s>{{ m.content | lower }}{% endfor %}",
            "does not show the question",
        ),
        ("{% for m in messages %}<s>{{ m.content | replace('.', '') }}{% endfor %}", "rewrites the steps"),
        ("{% for m in messages %}<s>{{ m.content }}e{% endfor %}", 'runs the answer "\\+" together'),
        ("{% for m in messages %}<s>{{ m.contents.text }}{{ m.content }}{{ raise }}{% endfor %}", "template"),
    ],
)
def test_a_template_that_is_not_of_alternating_turns_is_refused(
    make_reference, write_tokenizer, tmp_path, template, message
):
    write_tokenizer(tmp_path, chat_template=template, words=("ки", "+e"))
    make_reference("Qwen2ForCausalLM", vocab_size=300).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        cfprm_jax.load(tmp_path, "float32", encoding="rlhflow").score(QUESTION, SOLUTIONS[0])
