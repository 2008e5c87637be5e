"""A policy behind a server of OpenAI's completions that takes one step at a time in several rows.

A step is a request for a completion that stops at the separator. The prompt of each is the question's, and the text so
far tokenised as one text, whose keys and values a server with a prefix cache does not compute again. Whether the
separator or the end of the turn stopped a completion is in "stop_reason" (vLLM) or "matched_stop" (SGLang), which the
server must send.

The seed of a request comes from the run's seed, the question's name, the row, and the number of requests of the row
since the question began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cfprm_jax.data.steps import split_steps
from cfprm_jax.engines.engine import PrefixEncoder
from cfprm_jax.engines.server import ServerEngine
from cfprm_jax.errors import UserError
from cfprm_jax.inference.sampler import Prompt, Sampling
from cfprm_jax.searching.methods import Partial

_REASONS = ("stop_reason", "matched_stop")


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row.

    Attributes:
      partial: the solution as the search has it.
      written: all text so far, separators included.
    """

    partial: Partial = dataclasses.field(default_factory=Partial)
    written: str = ""


class ServerPolicy:
    """See the module; implements :class:`~cfprm_jax.searching.methods.StepPolicy`.

    Attributes:
      sampled, computed: numbers of tokens, as in the protocol; computed counts all tokens that were sent.
    """

    def __init__(
        self, engine: ServerEngine, encoder: PrefixEncoder, sampling: Sampling, separator: str, longest: int
    ) -> None:
        """A policy.

        Args:
          encoder: of the policy's tokenizer.
          longest: most tokens of a sequence of the policy.
        """
        self._engine, self._encoder, self._sampling, self._separator = engine, encoder, sampling, separator
        self._longest = longest
        self._prompt: Prompt | None = None
        self._rows: list[_Row] = []
        self.sampled = self.computed = self._segments = self._requests = 0

    @property
    def rows(self) -> list[Partial]:
        """The solution of each row."""
        return [row.partial for row in self._rows]

    def begin(self, question: Prompt) -> None:
        """One row with a prompt."""
        self._prompt, self._rows, self._requests = question, [_Row()], 0

    def branch(self, parents: Sequence[int]) -> None:
        """Row i becomes a copy of row parents[i]."""
        self._rows = [self._rows[i] for i in parents]

    def mark(self) -> Any:
        """The state for :meth:`restore`."""
        return list(self._rows)

    def restore(self, mark: Any) -> None:
        """The rows as they were."""
        self._rows = list(mark)

    def advance(self, to_end: bool = False, greedy: bool = False) -> None:
        """Each unfinished row takes a step, or all until it finishes.

        Raises:
          UserError: the server fails, or does not send what stopped a completion.
        """
        going = [i for i, row in enumerate(self._rows) if row.partial.finish is None]
        while going:
            self._requests += 1
            bodies = {i: self._body(i, to_end, greedy) for i in going}
            over = [i for i, body in bodies.items() if body is None]
            for i in over:
                self._rows[i] = _finished(self._rows[i], "length")
            live = {i: body for i, body in bodies.items() if body is not None}
            replies = self._engine.replies(list(live.values()))
            again = []
            for (i, body), reply in zip(live.items(), replies, strict=True):
                before = len(self._rows[i].partial.steps)
                self._rows[i] = self._continued(self._rows[i], reply, len(body["prompt"]), to_end)
                # White space before a step is no step.
                if self._rows[i].partial.finish is None and len(self._rows[i].partial.steps) == before:
                    again.append(i)
            going = again

    def _body(self, i: int, to_end: bool, greedy: bool) -> dict[str, Any] | None:
        """The request of a row; None where no token is left."""
        assert self._prompt is not None
        row, sampling = self._rows[i], self._sampling
        tokens = [*self._prompt.tokens.tolist(), *self._encoder.tokens(row.written)]
        left = min(sampling.max_new_tokens - row.partial.tokens, self._longest - len(tokens))
        if left < 1:
            return None
        temperature = 0.0 if greedy else sampling.temperature
        form = self._engine.form(dataclasses.replace(sampling, max_new_tokens=left, temperature=temperature))
        name = f"{self._prompt.name}\n{self._requests}"
        body = form.body(Prompt(name, self._prompt.tokens), i) | {"prompt": tokens}
        return body if to_end else body | {"stop": [self._separator]}

    def _continued(self, row: _Row, reply: Any, prompt_tokens: int, to_end: bool) -> _Row:
        """The row with a completion."""
        choice, tokens = reply["choices"][0], reply["usage"]["completion_tokens"]
        self.sampled += tokens
        self.computed += prompt_tokens + tokens
        self._segments += 1
        finish, text = choice["finish_reason"], choice["text"]
        if finish == "stop" and not to_end and self._at_separator(choice):
            finish, text = None, text.removesuffix(self._separator) + self._separator
        pieces = split_steps(text, self._separator)
        # A step that begins with white space may have a separator within it, as in the first lines of a solution.
        new = tuple(pieces) if to_end else ((self._separator.join(pieces),) if pieces else ())
        partial = Partial(row.partial.steps + new, (*row.partial.segments, (self._segments, tokens)), finish)
        return _Row(partial, row.written + text)

    def _at_separator(self, choice: Any) -> bool:
        found = [name for name in _REASONS if name in choice]
        if not found:
            raise UserError(
                f'{self._engine.name}: the server sends neither "stop_reason" nor "matched_stop" of a completion, so '
                "that the end of a step is not known from that of the solution"
            )
        return any(choice[name] == self._separator for name in found)


def _finished(row: _Row, finish: str) -> _Row:
    return dataclasses.replace(row, partial=dataclasses.replace(row.partial, finish=finish))
