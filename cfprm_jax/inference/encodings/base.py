"""What encodings of other programs have in common: token ids and score positions, and nothing scored in part."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import numpy as np
import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoded, Item, plain_tokenizer
from cfprm_jax.data.steps import split_steps
from cfprm_jax.errors import UserError

Tokenised = tuple[list[int], list[int]]
"""Token ids of a solution, and the index of each step's score position, ascending."""

# Texts kept tokenised: a few tens of MB.
_CACHE_ENTRIES = 1 << 16


class StepEncoder(abc.ABC):
    """Encodes solutions for scoring, with the interface of :class:`~cfprm_jax.data.encoding.Encoder`.

    Text never becomes a special token, as everywhere here: "<s>" in a question is ordinary characters. Not for several
    threads at once.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> None:
        """Raises UserError when the tokenizer does not have what the encoding needs."""
        self.config = config
        self._tokenizer = tokenizer
        self._plain = plain_tokenizer(tokenizer.backend_tokenizer)
        self._cache: dict[str, list[int]] = {}

    @abc.abstractmethod
    def _sequences(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Tokenised]:
        """Ids and score positions of each question with its steps."""

    def encode_many(self, items: Sequence[Item]) -> list[Encoded]:
        """Each solution, without labels. One longer than max_length has no tokens: it is not scored in part."""
        found = self._sequences([(question, steps) for question, steps, _ in items])
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.clear()
        return [
            _encoded(*sequence, len(steps), self.config.max_length)
            for sequence, (_, steps, _) in zip(found, items, strict=True)
        ]

    def split(self, text: str) -> list[str]:
        """The steps of a text that comes without them."""
        return split_steps(text, self.config.separator)

    def _tokenise(self, texts: Iterable[str]) -> None:
        """Put the ids of each text into the cache, without the tokens that the tokenizer puts around a text."""
        new = [text for text in dict.fromkeys(texts) if text not in self._cache]
        for text, encoding in zip(new, self._plain.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._cache[text] = encoding.ids

    def _ids(self, text: str) -> list[int]:
        """The ids of one text that is no special token."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def _one(self, text: str) -> int:
        """The id of a text that must be one token.

        Raises:
          UserError: it is several, or none.
        """
        ids = self._ids(text)
        if len(ids) != 1:
            raise UserError(
                f"the tokenizer in {self._tokenizer.name_or_path} gives {text!r} the ids {ids}, expected exactly one: "
                "the PRM is of another encoding"
            )
        return ids[0]


def _encoded(tokens: list[int], positions: list[int], steps: int, max_length: int) -> Encoded:
    if len(tokens) > max_length:
        tokens, positions = [], []
    return Encoded(
        tokens=np.array(tokens, np.int32),
        step_positions=np.array(positions, np.int32),
        labels=np.full(len(positions), np.nan, np.float32),
        steps_cut=steps - len(positions),
    )
