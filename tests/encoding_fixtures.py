"""Small random PRMs as other programs write them: a tokenizer made here, and a torch model of the real class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

QUESTION = "What is 1+1? <s> - ки?"
SOLUTIONS = (
    ["First the sum.", "It is 2.\nTwo is even.", "So 2."],
    ["First the sum.", "It is 3.", "So 3 +."],
    ["First the sum."],
    ["So <|end|> the\n\nanswer"],
)
# The parts of the model cards by which the two published families of causal models are recognised.
SHEPHERD_CARD = "step_tag = 'ки'\ncandidate_tokens = tokenizer.encode('+ -')[1:]"
RLHFLOW_CARD = "This is a process-supervised reward (PRM) from [RLHFlow/RLHF-Reward-Modeling](https://github.com)"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)


@pytest.fixture(scope="session")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., Any]:
    """Writes a byte-level tokenizer in which ends of steps merge with what follows; gives what transformers loads."""
    import tokenizers
    import transformers

    def write(
        directory: Any, bos: str | None = None, words: tuple[str, ...] = ("ки",), adds_bos: bool = False, **options: Any
    ) -> Any:
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        merges = [("t", "h"), ("th", "e"), ("Ċ", "Ċ"), (".", "Ċ"), (".", "ĊĊ"), ("?", "Ċ"), ("s", "u")]
        for word in words:
            ((spelled, _),) = level.pre_tokenize_str(word)
            merges += [(spelled[:i], spelled[i]) for i in range(1, len(spelled))]
        vocabulary = {token: i for i, token in enumerate(sorted(level.alphabet()))}
        for left, right in merges:
            vocabulary.setdefault(left + right, len(vocabulary))
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
        backend.pre_tokenizer, backend.decoder = level, tokenizers.decoders.ByteLevel()
        special = ["<s>", "<|start|>", "<|end|>", *options.pop("special", ())]
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
        if adds_bos:
            backend.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, **options)
        tokenizer.save_pretrained(str(directory), save_jinja_files=False)
        return transformers.AutoTokenizer.from_pretrained(str(directory))

    return write


@pytest.fixture(scope="session")
def ids_of() -> Callable[..., list[int]]:
    """The ids of a text in which special tokens are ordinary characters, as transformers tokenises."""

    def ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
        return tokenizer(text, split_special_tokens=True, **{"add_special_tokens": False, **options})["input_ids"]

    return ids


@pytest.fixture(scope="session")
def scored() -> Callable[..., list[list[float]]]:
    """Scores of SOLUTIONS, through the scorer, packed together; and checks that each alone has the same."""
    from cfprm_jax.inference.load import open_prm
    from cfprm_jax.inference.rows import sigmoid
    from cfprm_jax.inference.scorer import Scorer

    def score(directory: Any, **options: Any) -> list[list[float]]:
        loaded = open_prm(directory, "float32", **options)
        scores = {}
        for packing in ("tree", "none"):
            logits = Scorer(loaded, packing).score([(QUESTION, steps) for steps in SOLUTIONS])
            scores[packing] = [sigmoid(z).tolist() for z in logits]
        for one, other in zip(scores["tree"], scores["none"], strict=True):
            np.testing.assert_allclose(one, other, atol=2e-6)
        return scores["tree"]

    return score
