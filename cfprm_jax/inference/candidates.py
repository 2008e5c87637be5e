"""Questions to prompts, and what was sampled to rows of a candidates file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder
from cfprm_jax.data.question_files import QuestionRow
from cfprm_jax.errors import UserError
from cfprm_jax.inference.policy import Policy
from cfprm_jax.inference.sampler import Generated, Prompt


def encode_prompts(
    questions: Sequence[QuestionRow], policy: Policy, max_new_tokens: int, system_prompt: str
) -> list[Prompt]:
    """The prompt of every question, by the policy's chat template.

    Raises:
      UserError: prompts that leave no room for max_new_tokens in the model's context.
    """
    context, bound = policy.config.backbone.longest
    room = context - max_new_tokens
    encoding = EncodingConfig(max_length=context, system_prompt=system_prompt)
    items = [(q.question, (), None) for q in questions]
    encoded = Encoder(policy.tokenizer, encoding, prompts_only=True).encode_many(items)
    # A prompt over the context comes out empty.
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


def candidates_row(question: QuestionRow, candidates: Sequence[Generated], policy: Policy) -> dict[str, Any]:
    """The row of a question in a candidates file (docs/candidates.md)."""
    solutions = [c.tokens[:-1] if c.finish == "stop" else c.tokens for c in candidates]
    texts = policy.tokenizer.batch_decode(
        [np.asarray(tokens).tolist() for tokens in solutions], skip_special_tokens=True
    )
    dataset = {} if question.dataset is None else {"dataset": question.dataset}
    return {
        "id": question.id,
        **dataset,
        "question": question.question,
        "answer": question.answer,
        **question.rest,
        "candidates": [
            {"text": text, "finish": candidate.finish, "tokens": len(candidate.tokens)}
            for text, candidate in zip(texts, candidates, strict=True)
        ],
    }
