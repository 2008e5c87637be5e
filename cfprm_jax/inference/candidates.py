"""Questions to prompts, and what was sampled to rows of a candidates file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import transformers

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.errors import UserError
from cfprm_jax.inference.policy import Policy
from cfprm_jax.inference.sampler import Generated, Prompt


class Completion(NamedTuple):
    """One sampled text: how many tokens it has, the one that ended it among them, and "stop" or "length"."""

    text: str
    tokens: int
    finish: str


def completions(policy: Policy, generated: Sequence[Generated]) -> list[Completion]:
    """The texts of sampled tokens."""
    solutions = [g.tokens[:-1] if g.finish == "stop" else g.tokens for g in generated]
    texts = policy.tokenizer.batch_decode(
        [np.asarray(tokens).tolist() for tokens in solutions], skip_special_tokens=True
    )
    return [Completion(text, len(g.tokens), g.finish) for text, g in zip(texts, generated, strict=True)]


def encode_prompts(
    questions: Sequence[QuestionRow],
    tokenizer: transformers.PreTrainedTokenizerBase,
    longest: tuple[int, str],
    max_new_tokens: int,
    system_prompt: str,
) -> list[Prompt]:
    """The prompt of every question, by the policy's chat template.

    Args:
      longest: most tokens of a sequence, and the key of config.json that bounds them.

    Raises:
      UserError: prompts that leave no room for max_new_tokens in the model's context.
    """
    context, bound = longest
    room = context - max_new_tokens
    encoding = EncodingConfig(max_length=context, system_prompt=system_prompt)
    items = [(q.question, (), None) for q in questions]
    encoded = Encoder(tokenizer, encoding, prompts_only=True).encode_many(items)
    # A prompt over the context length gives an empty candidate.
    long = [
        question.source
        for question, prompt in zip(questions, encoded, strict=True)
        if not 0 < len(prompt.tokens) <= room
    ]
    if long:
        raise UserError(
            f"{long[0]}{f' and {len(long) - 1} more' if len(long) > 1 else ''}: prompt and --max_new_tokens="
            f"{max_new_tokens} together are beyond the model's {bound}={context}"
        )
    return [Prompt(question.name, prompt.tokens) for question, prompt in zip(questions, encoded, strict=True)]


def question_fields(question: QuestionRow) -> dict[str, Any]:
    """The fields of a candidates file's row that are the question's own."""
    dataset = {} if question.dataset is None else {"dataset": question.dataset}
    return {
        "id": question.id,
        **dataset,
        "question": question.question,
        "answer": question.answer,
        **question.rest,
    }


def candidates_row(question: QuestionRow, candidates: Sequence[Completion]) -> dict[str, Any]:
    """The row of a question in a candidates file (docs/candidates.md)."""
    return {
        **question_fields(question),
        "candidates": [
            {"text": candidate.text, "finish": candidate.finish, "tokens": candidate.tokens} for candidate in candidates
        ],
    }
