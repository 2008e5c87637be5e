"""The encoding of RLHFlow's PRMs (RLHFlow/Llama3.1-8B-PRM-*, github.com/RLHFlow/RLHF-Reward-Modeling): a conversation.

Each step is a turn of the user, the first with the question before it, and the assistant answers "+" to each. A step is
scored by a causal language model where its "+" is predicted: the probability of "+" against "-", among those two tokens
alone. The original program runs one conversation for each step, with "+" for all steps before it; a causal model
computes the same in one pass over the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tokenizers
import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import render_chat, special_tokens
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings.base import StepEncoder, Tokenised

GOOD, BAD = "+", "-"
# Placeholders of turns while the chat template is split; letters and digits only, so that none is trimmed.
_TURNS = tuple(f"TURN{number}x7f3b61d2" for number in range(6))

_Piece = int | tuple[str, int | None]
"""A special token's id; or a text, and the place in it of an answer "+"."""


class RLHFlowEncoder(StepEncoder):
    """See the module."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase, config: EncodingConfig) -> None:
        """Raises UserError when the tokenizer has no chat template for such a conversation."""
        super().__init__(tokenizer, config)
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer in {tokenizer.name_or_path} has no chat template, which rlhflow needs")
        self._special = special_tokens(self._plain)
        self._added = {token.content: i for i, token in self._plain.get_added_tokens_decoder().items()}
        rendered = render_chat(tokenizer, _conversation(_TURNS[::2], _TURNS[1::2]), False)
        pieces, rest = [], rendered
        for turn in _TURNS:
            piece, found, rest = rest.partition(turn)
            if not found:
                raise self._rewrites()
            pieces.append(piece)
        self._before, self._between, self._after = pieces[0], pieces[1], pieces[2]
        self._end = rest
        if {*pieces[1::2]} != {self._between} or {*pieces[2::2]} != {self._after}:
            raise self._rewrites()
        spaced = render_chat(tokenizer, _conversation([f" {_TURNS[0]} "], [GOOD]), False)
        self._trims = f" {_TURNS[0]} " not in spaced
        self._marked: dict[tuple[str, int], tuple[list[int], int]] = {}

    def signs(self) -> tuple[int, int]:
        """The ids of "+" and "-", whose logits are compared. UserError if they are not one token each."""
        return self._one(GOOD), self._one(BAD)

    def _sequences(self, items: Sequence[tuple[str, Sequence[str]]]) -> list[Tokenised]:
        conversations = [self._pieces(question, steps) for question, steps in items]
        texts = [piece for pieces in conversations for piece in pieces if not isinstance(piece, int)]
        self._tokenise(text for text, answer in texts if answer is None)
        if len(self._marked) > 1 << 16:
            self._marked.clear()
        new = list(dict.fromkeys((text, a) for text, a in texts if a is not None and (text, a) not in self._marked))
        batch = self._plain.encode_batch([text for text, _ in new], add_special_tokens=False)
        for (text, answer), encoding in zip(new, batch, strict=True):
            self._marked[text, answer] = encoding.ids, self._answer(encoding, answer)
        return [self._joined(pieces) for pieces in conversations]

    def _pieces(self, question: str, steps: Sequence[str]) -> list[_Piece]:
        """The conversation as special tokens and the texts between them, each with one answer at most."""
        if not steps:
            return []
        turns = [step.strip() for step in steps]
        turns[0] = f"{question} {turns[0]}"
        if self._trims:
            turns[0] = turns[0].strip()
        pieces: list[_Piece] = []
        text, answer, whole = "", None, ""

        def literal(template: str) -> None:
            nonlocal text, answer, whole
            whole += template
            # Splitting at a group puts the special tokens at the odd places.
            for place, part in enumerate(self._special.split(template)):
                if place % 2:
                    pieces.extend([(text, answer)] if text else [])
                    pieces.append(self._added[part])
                    text, answer = "", None
                else:
                    text += part

        literal(self._before)
        for number, turn in enumerate(turns):
            text, whole = text + turn, whole + turn
            literal(self._between)
            if answer is not None:
                raise self._rewrites("has no special token between its turns, which keep their texts apart")
            answer = len(text)
            text, whole = text + GOOD, whole + GOOD
            literal(self._after if number < len(turns) - 1 else self._end)
        pieces.extend([(text, answer)] if text else [])
        if render_chat(self._tokenizer, _conversation(turns, [GOOD] * len(turns)), False) != whole:
            raise self._rewrites(f"rewrites the steps of the question {question[:80]!r}")
        return pieces

    def _answer(self, encoding: tokenizers.Encoding, answer: int) -> int:
        """The index of the answer's token, which must be "+" alone."""
        for place, span in enumerate(encoding.offsets):
            if span == (answer, answer + 1):
                return place
        raise self._rewrites('runs the answer "+" together with what is beside it')

    def _joined(self, pieces: list[_Piece]) -> Tokenised:
        tokens: list[int] = []
        positions = []
        for piece in pieces:
            if isinstance(piece, int):
                tokens.append(piece)
                continue
            text, answer = piece
            if answer is None:
                tokens += self._cache[text]
            else:
                ids, place = self._marked[text, answer]
                positions.append(len(tokens) + place - 1)
                tokens += ids
        # What comes after the last score position has no part in any score.
        return tokens[: positions[-1] + 1] if positions else [], positions

    def _rewrites(self, what: str = "does not show turns of user and assistant alternately, each once") -> UserError:
        return UserError(f"the chat template of {self._tokenizer.name_or_path} {what}, as rlhflow needs")


def _conversation(users: Sequence[str], assistants: Sequence[str]) -> list[dict[str, str]]:
    pairs = zip(users, assistants, strict=True)
    return [
        {"role": role, "content": content}
        for role, content in itertools.chain.from_iterable((("user", u), ("assistant", a)) for u, a in pairs)
    ]
