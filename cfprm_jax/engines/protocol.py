"""Requests and replies of OpenAI's /v1/completions, for a server and for batch files alike.

A request has one completion, whose seed depends on the run's seed, the prompt's name and the completion's number. So
the first four of eight completions are those of four, whatever the server does with "n". The prompt is token ids: text
would be tokenised again, and not always to the same ids.

What a request leaves out, vLLM and SGLang take from the generation_config.json of the served model, such as a top_k of
20 and a repetition penalty of 1.1. So requests state the values that change nothing, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cfprm_jax.inference.candidates import Completion
from cfprm_jax.inference.sampler import Prompt, Sampling
from cfprm_jax.runtime import digests

NEUTRAL: Mapping[str, float] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Fields beyond OpenAI's, with values that change nothing. Old versions of vLLM and SGLang refuse a top_k of 0."""


class BadReplyError(Exception):
    """A reply that is no completion; its text has what was found."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What all requests have in common.

    Attributes:
      model: name of the policy at the server.
      omit_neutral: leave out what would change nothing, for servers that refuse these fields.
    """

    model: str
    sampling: Sampling
    omit_neutral: bool = False

    def body(self, prompt: Prompt, number: int) -> dict[str, Any]:
        """The request of one completion."""
        sampling = self.sampling
        seed = int.from_bytes(digests.raw(f"{sampling.seed}\n{prompt.name}\n{number}")[:4], "little") >> 1
        extra = {} if self.omit_neutral else dict(NEUTRAL)
        if sampling.top_k:
            extra["top_k"] = sampling.top_k
        return {
            "model": self.model,
            "prompt": prompt.tokens.tolist(),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **extra,
            "n": 1,
            "seed": seed,
        }


class LengthNote:
    """Says once that completions ended for their length before the most tokens that were asked for."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._said = log, False

    def look(self, made: Completion, most: int) -> None:
        """Look at a completion.

        Args:
          most: its max_tokens.
        """
        if made.finish == "length" and made.tokens < most and not self._said:
            self._said = True
            self._log(
                f"note        a completion was cut after {made.tokens:,} tokens of the {most:,} that it may have: the "
                "server has a limit of its own, as vLLM without --generation-config vllm, or with a --max-model-len "
                "that is too small"
            )


def request_name(prompt: Prompt, number: int, body: Mapping[str, Any]) -> str:
    """The custom_id of a completion in a batch file; its end stands for all of the request, sampling options included.

    Args:
      body: the request, of :meth:`Form.body`.
    """
    return f"{any_request(prompt, number)}{digests.of_json(body)[:16]}"


def any_request(prompt: Prompt, number: int) -> str:
    """What the custom_ids of a completion begin with, whatever prompt, model and options its question is sent with."""
    return f"{digests.of_text(prompt.name)[:32]}-{number}-"


def completion(reply: Any) -> Completion:
    """The one completion of a reply.

    Raises:
      BadReplyError: it is of another form.
    """
    choices = reply.get("choices") if isinstance(reply, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadReplyError(f"expected one choice, found {reply!r:.120}")
    text, finish = choices[0].get("text"), choices[0].get("finish_reason")
    if not isinstance(text, str):
        raise BadReplyError(f'"text" is {text!r:.80}, expected a string')
    if finish not in ("stop", "length"):
        raise BadReplyError(f'"finish_reason" is {finish!r:.80}, expected "stop" or "length"')
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise BadReplyError(f'"usage" has no "completion_tokens": {usage!r:.80}')
    return Completion(text, tokens, finish)
