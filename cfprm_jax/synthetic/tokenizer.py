"""A tokenizer for the arithmetic world: a byte-level BPE of the same kind as Qwen2.5's, with a few hundred tokens.

Every word of the world, with the sign before it ("three", "+two", "=five"), is one token. Other text is spelled out in
bytes, so nothing is lost. Being of Qwen2's own kind it loads the same in whatever reads a Qwen2 directory.
"""

from __future__ import annotations

import itertools

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cfprm_jax.config import MARKER
from cfprm_jax.synthetic.world import DAYS, MOVES, signed

PAD, SYSTEM, USER, SOLUTION = "<|endoftext|>", "<|system|>", "<|user|>", "<|solution|>"

# How Qwen2.5 cuts text before its merges; a sign belongs to the letters after it.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    + SYSTEM
    + "{% elif message['role'] == 'assistant' %}"
    + SOLUTION
    + "{% else %}"
    "" + USER + "{% endif %}"
    "{{ message['content'] }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + SOLUTION + "{% endif %}"
)


def words() -> list[str]:
    """Every word of problems and solutions, and the separator of steps."""
    signed_days = [f"={day}" for day in DAYS]
    return ["start", "so", "answer", " again", "\n\n", *DAYS, *signed_days, *(signed(move) for move in MOVES)]


def _merges() -> list[tuple[str, str]]:
    """Merges that spell each word from left to right, a leading sign last."""
    merges: dict[tuple[str, str], None] = {}
    # The byte-level alphabet writes a space as Ġ and a line break as Ċ.
    for word in (word.replace(" ", "Ġ").replace("\n", "Ċ") for word in sorted(words(), key=lambda w: not w.isalpha())):
        sign, letters = ("", word) if word.isalpha() and word[0].isascii() else (word[0], word[1:])
        pieces = itertools.accumulate(letters)
        merges |= dict.fromkeys(zip(pieces, letters[1:], strict=False))
        if sign:
            merges[sign, letters] = None
    return list(merges)


def make_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """The tokenizer; padding is id 0, and the marker is one token that no text becomes."""
    special = [PAD, SYSTEM, USER, SOLUTION, MARKER]
    merges = _merges()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*special, *alphabet, *(first + second for first, second in merges)])
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=PAD,
        eos_token=PAD,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
