"""Question and steps to token ids and marker positions: one function for training and for scoring.

A solution is encoded as the tokenizer's chat template with the system prompt and the question, then for every step (or
window of steps) its own tokens followed by one marker token, at which the step's score is read. Steps are tokenised
each on its own and the marker is appended as an id: joining texts first lets a tokenizer merge the end of a step with
what follows (".\\n\\n" is one token of Qwen2.5) and hides where steps end.

Text never becomes a special token. Questions and steps are data, so "<extra_0>" or "<|im_end|>" inside them are
ordinary characters; only the chat template and the markers put in here are special.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
import transformers
from jaxtyping import Float32, Int32

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.steps import split_steps
from cfprm_jax.errors import UserError
from cfprm_jax.model_directory.tokenizer_files import (
    check_chat_template,
    load_tokenizer,
    marker_id,
    render_chat,
    save_tokenizer,
)

__all__ = ["Encoded", "Encoder", "Item", "load_tokenizer", "marker_id", "render_chat", "save_tokenizer"]

# Stands for the question while the chat template is taken apart; letters and digits only, so that no template trims it.
_PLACEHOLDER = "QUESTION7f3b61d2PLACEHOLDER"
# Unique texts kept tokenised. At some 200 bytes each this is a few tens of MB, whatever the corpus.
_CACHE_ENTRIES = 1 << 16

Targets = Sequence[float] | np.ndarray | None
"""A number a step, NaN where there is none, or None for none at all."""

Item = tuple[str, Sequence[str], Targets]
"""Question, step texts and labels."""


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """One solution as the model reads it.

    Attributes:
      tokens: the prompt, then every window's tokens and its marker. Empty when the prompt alone is over the length.
      step_positions: index in tokens of each window's marker, ascending.
      labels: a label a window in [0, 1], NaN where unlabelled.
      steps_cut: windows cut from the end because of max_length, with their labels.
      redundancy: the second target of each window, NaN where there is none; None where there are none at all.
    """

    tokens: Int32[np.ndarray, " length"]
    step_positions: Int32[np.ndarray, " steps"]
    labels: Float32[np.ndarray, " steps"]
    steps_cut: int
    redundancy: Float32[np.ndarray, " steps"] | None = None


class Encoder:
    """Encodes solutions with one tokenizer and one set of options. Not for several threads at once."""

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig, *, prompts_only: bool = False
    ) -> None:
        """Prepares the tokenizer.

        Args:
          prompts_only: only solutions without steps are encoded, for which the tokenizer needs no marker.

        Raises:
          UserError: the tokenizer has no chat template, or the marker is not one token of it.
        """
        self.config = config
        self.marker_id = None if prompts_only else marker_id(tokenizer, config.marker)
        check_chat_template(tokenizer)
        self._tokenizer = tokenizer
        self._whole: tokenizers.Tokenizer = tokenizer.backend_tokenizer
        self._plain = plain_tokenizer(self._whole, None if prompts_only else config.marker)
        if not prompts_only and self.marker_id in self._plain.encode(config.marker, add_special_tokens=False).ids:
            raise UserError(
                f"--marker={config.marker!r} is an ordinary word of the tokenizer in {tokenizer.name_or_path}, so that "
                "text could hold it: it must be an added token"
            )
        self._special = special_tokens(self._plain)
        template = self._render(_PLACEHOLDER)
        if template.count(_PLACEHOLDER) != 1:
            raise UserError(f"the chat template of {tokenizer.name_or_path} does not show the question exactly once")
        self._before, self._after = template.split(_PLACEHOLDER)
        self._prompts: dict[str, np.ndarray] = {}
        self._windows: dict[str, np.ndarray] = {}

    def encode(
        self, question: str, steps: Sequence[str], labels: Sequence[float] | np.ndarray | None = None
    ) -> Encoded:
        """One solution; labels None leaves every step unlabelled. See :meth:`encode_many`."""
        return self.encode_many([(question, steps, labels)])[0]

    def encode_many(self, items: Sequence[Item], redundancy: Sequence[Targets] | None = None) -> list[Encoded]:
        """Many solutions; the same as encoding each alone, but every distinct text is tokenised once, all in one call.

        Longer than max_length: whole windows are cut from the end with their labels, and counted in steps_cut; a
        prompt with which not even one window fits gives an Encoded without steps.

        Args:
          redundancy: of each solution the second targets of its steps; None where there are none.

        Raises:
          UserError: as many labels as steps are expected.
        """
        self._tokenise_prompts(question for question, _, _ in items)
        self._tokenise_windows(step for _, steps, _ in items for step in steps)
        second = [None] * len(items) if redundancy is None else redundancy
        encoded = [self._assemble(*item, own) for item, own in zip(items, second, strict=True)]
        for cache in (self._prompts, self._windows):
            if len(cache) > _CACHE_ENTRIES:
                cache.clear()
        return encoded

    def split(self, text: str) -> list[str]:
        """A solution's text cut at the step separator (see :func:`split_steps`).

        Raises:
          UserError: the separator is empty, so that it cuts nothing.
        """
        if not self.config.separator:
            raise UserError("--step_separator is empty, so a text cannot be split into steps: give the steps")
        return split_steps(text, self.config.separator)

    def _assemble(self, question: str, steps: Sequence[str], labels: Targets, redundancy: Targets = None) -> Encoded:
        if labels is None:
            labels = np.full(len(steps), np.nan, np.float32)
        for name, targets in (("labels", labels), ("redundancies", redundancy)):
            if targets is not None and len(targets) != len(steps):
                raise UserError(f"{len(steps)} steps but {len(targets)} {name} for the question {question[:80]!r}")
        prompt = self._prompts[question]
        windows = [self._windows[step] for step in steps]
        lengths = np.fromiter((len(window) for window in windows), np.int64, len(windows))
        ends = len(prompt) + np.cumsum(lengths)
        kept = int(np.searchsorted(ends, self.config.max_length, side="right"))
        if len(prompt) > self.config.max_length:
            prompt = prompt[:0]
        return Encoded(
            tokens=np.concatenate([prompt, *windows[:kept]]),
            step_positions=(ends[:kept] - 1).astype(np.int32),
            labels=np.asarray(labels[:kept], np.float32),
            steps_cut=len(steps) - kept,
            redundancy=None if redundancy is None else np.asarray(redundancy[:kept], np.float32),
        )

    def _tokenise_windows(self, texts: Iterable[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._windows]
        if new and self.marker_id is None:
            raise ValueError("steps for an encoder of prompts only")
        for text, encoding in zip(new, self._plain.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._windows[text] = np.array([*encoding.ids, self.marker_id], np.int32)

    def _tokenise_prompts(self, questions: Iterable[str]) -> None:
        new = [question for question in dict.fromkeys(questions) if question not in self._prompts]
        # Other users of the tokenizer may have enabled these.
        self._whole.no_padding()
        self._whole.no_truncation()
        whole = [question for question in new if not self._special.search(question)]
        rendered = [self._render(question) for question in whole]
        for question, encoding in zip(
            whole, self._whole.encode_batch_fast(rendered, add_special_tokens=False), strict=True
        ):
            self._prompts[question] = np.array(encoding.ids, np.int32)
        for question in set(new).difference(whole):
            self._prompts[question] = np.array(self._guarded_prompt(question), np.int32)

    def _guarded_prompt(self, question: str) -> list[int]:
        """The prompt's ids for a question that holds the text of a special token.

        The template's own special tokens cut the prompt into texts, as they do in a tokenizer; the text around the
        question is tokenised with special tokens switched off.
        """
        rendered = self._render(question)
        end = len(rendered) - len(self._after)
        if not (rendered.startswith(self._before) and rendered.endswith(self._after) and len(self._before) <= end):
            raise UserError(
                f"the chat template of {self._tokenizer.name_or_path} rewrites the question {question[:80]!r}, which "
                "holds the text of a special token"
            )
        *head, before = self._special.split(self._before)
        after, *tail = self._special.split(self._after)
        pieces = [*head, before + rendered[len(self._before) : end] + after, *tail]
        ids: list[int] = []
        # Splitting at a group puts the special tokens at the odd places.
        for index, piece in enumerate(pieces):
            if index % 2:
                ids += self._whole.encode(piece, add_special_tokens=False).ids
            else:
                ids += self._plain.encode(piece, add_special_tokens=False).ids
        return ids

    def _render(self, question: str) -> str:
        system = [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []
        return render_chat(self._tokenizer, [*system, {"role": "user", "content": question}], True)


def special_tokens(tokenizer: tokenizers.Tokenizer) -> re.Pattern[str]:
    """Matches the text of each special token, in a group; splitting at it puts special tokens at the odd places."""
    added = tokenizer.get_added_tokens_decoder().values()
    special = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, special)) or "(?!)") + ")")


def plain_tokenizer(whole: tokenizers.Tokenizer, marker: str | None = None) -> tokenizers.Tokenizer:
    """A copy of the tokenizer that encodes the text of special tokens and of the marker as ordinary text."""
    plain = copy.deepcopy(whole)
    if marker is not None:
        # Some tokenizers declare the marker an ordinary added token, which text would still become.
        plain.add_special_tokens([tokenizers.AddedToken(marker, special=True, normalized=False)])
    plain.encode_special_tokens = True
    plain.no_padding()
    plain.no_truncation()
    return plain
