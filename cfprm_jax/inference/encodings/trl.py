"""The encoding of TRL's PRMTrainer (up to TRL 1.13, trl/experimental/prm): plain text, a separator after each step.

The tokenizer's BOS token, if it has one; the question's tokens; then each step's own tokens and the separator's. A step
is scored at the last token of its separator. No chat template, and nothing between question and first step. (The
snippet in TRL's documentation joins everything into one text instead, which gives other tokens than training saw.)
"""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings.base import StepEncoder, Tokenised


class TRLEncoder(StepEncoder):
    """See the module. The separator is config.separator, TRL's --step_separator."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> None:
        """Raises UserError when the separator has no tokens."""
        super().__init__(tokenizer, config)
        self._separator = self._ids(config.separator)
        if not self._separator:
            raise UserError(f"--step_separator='{config.step_separator}' has no token, at which a step could be scored")
        bos = tokenizer.bos_token_id
        self._bos = [] if bos is None else [bos]

    def _sequences(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Tokenised]:
        self._tokenise(text for question, steps in items for text in (question, *steps))
        found = []
        for question, steps in items:
            tokens, positions = self._bos + self._cache[question], []
            for step in steps:
                tokens = tokens + self._cache[step] + self._separator
                positions.append(len(tokens) - 1)
            found.append((tokens, positions))
        return found
