"""The encoding of Skywork-o1-Open-PRM (github.com/SkyworkAI/skywork-o1-prm-inference): a newline token ends each line.

The tokenizer's BOS token, the question and a line break; then, line by line, the line's own tokens and the token of a
line break. A step has one line or more and is scored at its last newline token. The head is a value head,
v_head.summary, whose sigmoid is the score.
"""

from __future__ import annotations

from collections.abc import Sequence

import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings.base import StepEncoder, Tokenised


class SkyworkEncoder(StepEncoder):
    """See the module."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> None:
        """Raises UserError when the tokenizer has no BOS token."""
        super().__init__(tokenizer, config)
        if tokenizer.bos_token_id is None:
            raise UserError(
                f"the tokenizer in {tokenizer.name_or_path} has no bos_token, with which the skywork encoding begins"
            )
        self._newline = self._ids("\n")[-1]
        # What the tokenizer puts before any text: the original program encodes line by line, with it.
        self._before = self._plain.encode("", add_special_tokens=True).ids
        self._start = [*self._before, tokenizer.bos_token_id]

    def split(self, text: str) -> list[str]:
        """The lines of a text, each with the blank lines after it, which have newline tokens of their own.

        So the tokens of the steps are those of the whole text.
        """
        steps: list[list[str]] = []
        blank_so_far = True
        for line in text.split("\n"):
            if not steps or (line.strip() and not blank_so_far):
                steps.append([line])
            else:
                steps[-1].append(line)
            blank_so_far = blank_so_far and not line.strip()
        return [] if blank_so_far else ["\n".join(lines) for lines in steps]

    def _sequences(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Tokenised]:
        self._tokenise(f"{question}\n" for question, _ in items)
        self._tokenise(line for _, steps in items for step in steps for line in step.split("\n"))
        found = []
        for question, steps in items:
            tokens, positions = self._start + self._cache[f"{question}\n"], []
            for step in steps:
                for line in step.split("\n"):
                    tokens = tokens + (self._before + self._cache[line] if line else []) + [self._newline]
                positions.append(len(tokens) - 1)
            found.append((tokens, positions))
        return found
