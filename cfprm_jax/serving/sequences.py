"""Requests to token sequences with score positions, within the limits of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cfprm_jax.data.encoding import render_chat
from cfprm_jax.errors import UserError
from cfprm_jax.inference.encodings import SolutionEncoder
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.prefix_rows import Tokens
from cfprm_jax.serving.errors import RequestError
from cfprm_jax.serving.requests import MarkedRequest, StepsRequest


@dataclasses.dataclass(frozen=True)
class SequenceEncoder:
    """Makes the sequences of requests. For one thread.

    Attributes:
      loaded: the PRM.
      encoder: its encoding.
      most: sequences of a request.
    """

    loaded: LoadedPRM
    encoder: SolutionEncoder
    most: int

    @property
    def max_length(self) -> int:
        """Most tokens of a sequence."""
        return self.loaded.encoding.max_length

    def steps(self, request: StepsRequest) -> list[Tokens]:
        """A sequence for each solution, by the PRM's own encoding: text never becomes a special token.

        Raises:
          RequestError: 413 for a solution over max_length, or too many of them.
        """
        self._check_count(len(request.solutions))
        try:
            encoded = self.encoder.encode_many([(request.question, steps, None) for steps in request.solutions])
        except UserError as error:
            raise RequestError(400, str(error)) from error
        found = [Tokens(e.tokens, e.step_positions) for e in encoded]
        for i, (sequence, steps) in enumerate(zip(found, request.solutions, strict=True)):
            if len(sequence.positions) < len(steps):
                where = '"steps"' if request.single else f'"solutions"[{i}]'
                raise RequestError(
                    413,
                    f"{where}: with its prompt the solution has more than the model's {self.max_length} tokens: "
                    f"{len(sequence.positions)} of its {len(steps)} steps fit",
                    "steps" if request.single else "solutions",
                )
        return found

    def marked(self, request: MarkedRequest, field: str) -> list[Tokens]:
        """A sequence for each input, with a position at each marker; texts may hold special tokens, as in vLLM.

        Args:
          field: of the body, for messages.

        Raises:
          RequestError: 400 without a marker or with ids that the model lacks, 413 for too many tokens.
        """
        self._check_count(len(request.inputs))
        marker = getattr(self.encoder, "marker_id", None)
        if marker is None:
            raise RequestError(
                400,
                f"a PRM of the encoding {self.loaded.encoding_name} has no marker that a text could hold: "
                "use /v1/steps",
                field,
            )
        return [self._marked(ids, marker, request, field) for ids in self._ids(request)]

    def _ids(self, request: MarkedRequest) -> list[Sequence[int]]:
        tokenizer = self.loaded.tokenizer
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
        found: list[Sequence[int]] = []
        for given in request.inputs:
            if isinstance(given, str):
                special = request.add_special_tokens is not False
                found.append(tokenizer.backend_tokenizer.encode(given, add_special_tokens=special).ids)
            elif isinstance(given[0], int):
                found.append(given)
            else:
                messages = [{"role": role, "content": content} for role, content in given]
                try:
                    text = render_chat(tokenizer, messages, False)
                except UserError as error:
                    raise RequestError(400, str(error), "messages") from error
                special = bool(request.add_special_tokens)
                found.append(tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids)
        return found

    def _marked(self, ids: Sequence[int], marker: int, request: MarkedRequest, field: str) -> Tokens:
        vocabulary = self.loaded.config.backbone.vocab_size
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise RequestError(400, f"token id {wrong} is not below the model's vocabulary of {vocabulary}", field)
        if request.truncate is not None:
            kept = self.max_length if request.truncate == -1 else request.truncate
            ids = ids[-kept:] if request.keep_end else ids[:kept]
        if len(ids) > self.max_length:
            raise RequestError(
                413, f"the input has {len(ids)} tokens, and the model takes at most {self.max_length}", field
            )
        tokens = np.array(ids, np.int32)
        positions = np.flatnonzero(tokens == marker).astype(np.int32)
        if not len(positions):
            text = self.loaded.tokenizer.convert_ids_to_tokens(marker)
            raise RequestError(
                400, f"no marker in the input: each step must be followed by {text!r} (token id {marker})", field
            )
        return Tokens(tokens, positions)

    def _check_count(self, count: int) -> None:
        if count > self.most:
            raise RequestError(413, f"{count} solutions in one request, at most {self.most} are allowed")
