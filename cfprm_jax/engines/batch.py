"""A policy that is run by someone else, with files: requests out, completions in, round by round.

Requests are rows of OpenAI's batch form for /v1/completions. The results of all rounds are given together; what is
missing in them is the next file of requests.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence

from cfprm_jax.data.formats.files import Paths, expand, rows
from cfprm_jax.engines.engine import EngineCounts
from cfprm_jax.engines.protocol import BadReplyError, Form, LengthNote, any_request, completion, request_name
from cfprm_jax.errors import UserError
from cfprm_jax.inference.candidates import Completion
from cfprm_jax.inference.sampler import Prompt, Sampling
from cfprm_jax.runtime import atomic

URL = "/v1/completions"


class RequestsWritten(Exception):  # noqa: N818  (not an error: the run continues when the completions are there)
    """Ends a command that waits for completions; its text is for the user. Made where all requests are known."""

    def __init__(self, engine: BatchEngine, path: str) -> None:
        """Write the requests that are missing.

        Raises:
          UserError: no file to write them to.
        """
        other = (
            f"has {engine.of_other_requests:,} of these for other requests: another prompt, model, seed or sampling "
            "option, or an earlier version"
        )
        if not path:
            has = f"; it {other}" if engine.of_other_requests else ""
            raise UserError(
                f"--completions lacks {len(engine.missing):,} of them{has}. --write_requests=FILE writes them"
            )
        count = engine.write_missing(path)
        has = f"; --completions {other}" if engine.of_other_requests else ""
        super().__init__(
            f"requests    {count:,} in {path}{has}\n"
            "next        run them, then repeat the command with their results added to --completions, and --resume=auto"
        )


class BatchEngine:
    """An engine over files.

    Attributes:
      missing: requests whose completions were not there.
      of_other_requests: how many of these were there for another prompt, model or sampling option.
    """

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        completions: Paths | None,
        omit_neutral: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Reads the completions.

        Args:
          omit_neutral: see :class:`~cfprm_jax.engines.protocol.Form`.
          log: receives a line where completions were ended before their most tokens.

        Raises:
          UserError: a row that is no result, a request that failed, or two completions of one request.
        """
        self.name, self.counts = model, EngineCounts()
        self._form, self._note = Form(model, sampling, omit_neutral), LengthNote(log)
        self._made = _read(completions) if completions else {}
        self._begun = {_beginning(name) for name in self._made}
        self.missing: dict[str, dict[str, object]] = {}
        self.of_other_requests = 0

    def complete(
        self, prompts: Sequence[Prompt], number: int, report: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, list[Completion]]]:
        """See :class:`~cfprm_jax.engines.engine.Engine`; prompts with a completion missing are noted and left out."""
        for place, prompt in enumerate(prompts):
            bodies = [self._form.body(prompt, one) for one in range(number)]
            names = [request_name(prompt, one, body) for one, body in enumerate(bodies)]
            lacking = [one for one, name in enumerate(names) if name not in self._made]
            for one in lacking:
                if names[one] not in self.missing:
                    self.missing[names[one]] = bodies[one]
                    self.of_other_requests += _beginning(any_request(prompt, one)) in self._begun
            if lacking:
                continue
            found = [self._made[name] for name in names]
            for made in found:
                self._note.look(made, self._form.sampling.max_new_tokens)
            self.counts.completions += number
            self.counts.tokens += sum(made.tokens for made in found)
            self.counts.prompt_tokens += number * len(prompt.tokens)
            report()
            yield place, found

    def write_missing(self, path: str | pathlib.Path) -> int:
        """Write the requests that are missing; how many there are."""
        requests = (
            {"custom_id": name, "method": "POST", "url": URL, "body": body} for name, body in self.missing.items()
        )
        atomic.write_bytes(path, b"".join(map(atomic.encode_json, requests)))
        return len(self.missing)


def _beginning(name: str) -> str:
    """The name and number of a request in its custom_id; earlier versions had nothing else there."""
    return "-".join(name.split("-")[:2])


def _read(paths: Paths) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    for file in expand(paths):
        for row in rows(file):
            where = f"{file.name}:{row.line}"
            if row.data is None:
                raise UserError(f"{where}: {row.reason}")
            name, response = row.data.get("custom_id"), row.data.get("response")
            if not isinstance(name, str) or not isinstance(response, dict):
                reason = row.data.get("error") or "no custom_id and response"
                raise UserError(f"{where}: not the result of a request: {reason!r:.200}")
            if response.get("status_code", 200) != 200:
                raise UserError(f"{where}: the request failed with status {response['status_code']}")
            try:
                made = completion(response.get("body"))
            except BadReplyError as error:
                raise UserError(f"{where}: not a completion: {error}") from None
            if name in found:
                raise UserError(f"{where}: a second completion of {name!r:.80}")
            found[name] = made
    return found
