"""The encoding of Math-Shepherd's PRM (peiyi9979/math-shepherd-mistral-7b-prm): one text, " ки" after each step.

The text is "QUESTION Step 1: ... ки\\nStep 2: ... ки", tokenised as a whole, with the tokenizer's BOS token. A step is
scored at its tag by a causal language model: the probability of "+" against "-", among those two tokens alone. Steps of
Math-Shepherd begin with their number; one that does not is given it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings.base import StepEncoder, Tokenised

TAG = "ки"
_NUMBERED = re.compile(r"step\s*\d+\s*[:.]", re.IGNORECASE)


class MathShepherdEncoder(StepEncoder):
    """See the module."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> None:
        """Raises UserError when the tag is not one token."""
        super().__init__(tokenizer, config)
        self.marker_id = self._one(TAG)

    def signs(self) -> tuple[int, int]:
        """The ids of "+" and "-", whose logits at a tag are compared.

        Raises:
          UserError: they are not one token each.
        """
        ids = self._ids("+ -")
        if len(ids) != 2:
            raise UserError(
                f"the tokenizer in {self._tokenizer.name_or_path} gives '+ -' the ids {ids}, expected two: the PRM "
                "is of another encoding"
            )
        return ids[0], ids[1]

    def _sequences(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Tokenised]:
        texts, ends = [], []
        for question, steps in items:
            text, tags = f"{question} ", []
            for number, step in enumerate(steps, 1):
                text += ("\n" if number > 1 else "") + _tagged(step, number)
                tags.append(len(text))
            texts.append(text)
            ends.append(tags)
        found = []
        for (question, _), encoding, tags in zip(items, self._plain.encode_batch(texts), ends, strict=True):
            # The last token that ends where the tag does.
            at = {end: place for place, (_, end) in enumerate(encoding.offsets)}
            positions = [at.get(end, 0) for end in tags]
            if any(encoding.ids[place] != self.marker_id for place in positions):
                raise UserError(
                    f"the tokenizer in {self._tokenizer.name_or_path} does not end a step of the question "
                    f"{question[:80]!r} with the token of {TAG!r}: the PRM is of another encoding"
                )
            found.append((encoding.ids, positions))
        return found


def _tagged(step: str, number: int) -> str:
    """The step with its number before it and its tag behind it, as the training texts have them."""
    text = step.strip().removesuffix(TAG).rstrip()
    return f"{text} {TAG}" if _NUMBERED.match(text) else f"Step {number}: {text} {TAG}"
