"""One interface to a policy: prompts as token ids in, completions as texts out."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import transformers
from jaxtyping import Int32

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder, load_tokenizer, plain_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.candidates import Completion
from cfprm_jax.inference.sampler import Prompt


@dataclasses.dataclass
class EngineCounts:
    """What an engine has done so far.

    Attributes:
      completions, tokens: sampled.
      live: completions in progress.
      prompt_tokens: tokens of the prompts, each counted once for every completion of it.
      prefilled: tokens of prompts that were computed; None where another program computes them.
      padding: tokens that were computed beside them, to fill blocks; None likewise.
      retries: requests that were sent again.
    """

    completions: int = 0
    tokens: int = 0
    live: int = 0
    prompt_tokens: int = 0
    prefilled: int | None = None
    padding: int | None = None
    retries: int = 0


class Engine(Protocol):
    """Samples from one policy.

    Attributes:
      name: the policy, for what is written.
      counts: kept up to date while completions are made.
    """

    name: str
    counts: EngineCounts

    def complete(
        self, prompts: Sequence[Prompt], number: int, report: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, list[Completion]]]:
        """The place of each prompt with its completions, in the order in which they are made.

        A completion depends on the seed, the prompt and its name, and its number: the first ones of more are those of
        fewer. A prompt that the engine cannot complete now is missing.

        Args:
          number: completions of each prompt.
          report: called now and then.
        """
        ...


class PrefixEncoder:
    """Questions, and what a policy has written already, to token ids. The prefix is tokenised as one text."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, longest: int, system_prompt: str) -> None:
        """An encoder of prompts of at most longest tokens."""
        encoding = EncodingConfig(max_length=longest, system_prompt=system_prompt)
        self._longest = longest
        self._prompts = Encoder(tokenizer, encoding, prompts_only=True)
        self._plain = plain_tokenizer(tokenizer.backend_tokenizer)

    def encode(self, question: str, prefix: str = "") -> Int32[np.ndarray, " length"] | None:
        """The prompt of a question and the prefix of a solution; None where it is too long."""
        prompt = self._prompts.encode(question, ()).tokens
        written = self.tokens(prefix)
        if not 0 < len(prompt) <= self._longest - len(written):
            return None
        return np.concatenate([prompt, np.array(written, np.int32)])

    def tokens(self, text: str) -> list[int]:
        """The ids of a text that a policy wrote."""
        return self._plain.encode(text, add_special_tokens=False).ids if text else []

    def pieces(self, text: str, size: int) -> list[str]:
        """A text cut into pieces of size tokens, the last of which may be shorter."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        cuts = [encoding.offsets[place][0] for place in range(size, len(encoding.ids), size)]
        # Bytes of one character may be several tokens, which all begin where it does.
        ends = sorted({*cuts, len(text)} - {0})
        return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False) if text[begin:end]]


def open_tokenizer(directory: str | pathlib.Path) -> tuple[transformers.PreTrainedTokenizerBase, tuple[int, str]]:
    """The tokenizer of a policy that runs elsewhere, and the longest sequence with its name in config.json.

    Raises:
      UserError: no Hugging Face directory with a supported backbone and a tokenizer.
    """
    backbone, _ = loading.read_config(directory)
    return load_tokenizer(directory, None, backbone.vocab_size), backbone.longest
