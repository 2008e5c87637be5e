"""A policy behind a server of OpenAI's completions (vLLM, SGLang, and others), with many concurrent requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cfprm_jax.engines.engine import EngineCounts
from cfprm_jax.engines.protocol import NEUTRAL, BadReplyError, Form, LengthNote, completion
from cfprm_jax.engines.threads import RequestThreads
from cfprm_jax.errors import UserError
from cfprm_jax.inference.candidates import Completion
from cfprm_jax.inference.sampler import Prompt, Sampling

# Between two tries of a request, in seconds: doubled from the first to the last.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
# Statuses of a server that is busy or restarts; others will not change.
_TRY_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_KEY = "OPENAI_API_KEY"
_LONGEST_MESSAGE = 300


class ServerEngine:
    """An engine that posts to URL/completions; completions come in the order in which the server ends them."""

    def __init__(
        self,
        url: str,
        model: str,
        sampling: Sampling,
        *,
        concurrency: int,
        seconds: float,
        retries: int,
        first_wait: float = _FIRST_WAIT,
        omit_neutral: bool = False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """An engine; its model is the one that the server lists.

        Args:
          url: up to and with /v1.
          model: name of the policy at the server; empty for the only one that it has.
          concurrency: requests at once.
          seconds: that a reply may take.
          retries: of a request after the first try.
          first_wait: seconds before the first of them.
          omit_neutral: see :class:`~cfprm_jax.engines.protocol.Form`.
          log: receives a line where the server ends completions before their most tokens.

        Raises:
          UserError: no URL, no server there, or no such model.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError(f"--engine={url!r:.200} is not http://HOST:PORT/v1")
        self._url, self._seconds, self._retries = url.rstrip("/"), seconds, retries
        self._concurrency, self._first_wait = concurrency, first_wait
        self.counts = EngineCounts()
        self._lock = threading.Lock()
        self.name = self._model(model)
        self._form = Form(self.name, sampling, omit_neutral)
        self._note = LengthNote(log)

    def complete(
        self, prompts: Sequence[Prompt], number: int, report: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, list[Completion]]]:
        """See :class:`~cfprm_jax.engines.engine.Engine`.

        Raises:
          UserError: a request failed as often as it may; what was complete before has been given.
        """
        found: dict[int, dict[int, Completion]] = {place: {} for place in range(len(prompts))}
        jobs = iter([(place, one) for place in range(len(prompts)) for one in range(number)])
        threads, stopped = RequestThreads(self._concurrency), threading.Event()
        running: dict[concurrent.futures.Future[Completion], tuple[int, int]] = {}

        def start() -> None:
            while len(running) < 2 * self._concurrency and (job := next(jobs, None)) is not None:
                body = self._form.body(prompts[job[0]], job[1])
                running[threads.submit(functools.partial(self._one, body, stopped))] = job

        failed: UserError | None = None
        try:
            start()
            while running:
                self.counts.live = min(len(running), self._concurrency)
                done, _ = concurrent.futures.wait(running, 1.0, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    place, one = running.pop(future)
                    try:
                        found[place][one] = made = future.result()
                    except UserError as error:
                        # Requests in flight may still complete a prompt; the others are cancelled.
                        failed = failed or error
                        stopped.set()
                        for other in [waiting for waiting in running if waiting.cancel()]:
                            del running[other]
                        continue
                    self._note.look(made, self._form.sampling.max_new_tokens)
                    self.counts.completions += 1
                    self.counts.tokens += made.tokens
                    self.counts.prompt_tokens += len(prompts[place].tokens)
                    if len(found[place]) == number:
                        completions = found.pop(place)
                        yield place, [completions[one] for one in range(number)]
                if failed is None:
                    start()
                report()
            if failed is not None:
                raise failed
        finally:
            # After Ctrl-C, too, when replies are still to come: nothing waits for them.
            stopped.set()
            threads.close()

    def replies(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        """The replies to requests of a completion each, in their order.

        Raises:
          UserError: a request failed as often as it may.
        """
        stopped = threading.Event()
        with contextlib.closing(RequestThreads(self._concurrency)) as threads:
            try:
                futures = [
                    threads.submit(functools.partial(self._retried, "completions", body, stopped)) for body in bodies
                ]
                found = [future.result() for future in futures]
            finally:
                stopped.set()
        for body, reply in zip(bodies, found, strict=True):
            self._note.look(completion(reply), body["max_tokens"])
        return found

    def form(self, sampling: Sampling) -> Form:
        """The form of requests with other sampling options."""
        return dataclasses.replace(self._form, sampling=sampling)

    def _one(self, body: dict[str, Any], stopped: threading.Event) -> Completion:
        return completion(self._retried("completions", body, stopped))

    def _retried(self, path: str, body: dict[str, Any] | None, stopped: threading.Event) -> Any:
        """The reply to a request that may be sent again, until stopped is set.

        Raises:
          UserError: it failed too often, or in a way that will not change.
        """
        wait = self._first_wait
        for attempt in range(self._retries + 1):
            try:
                reply = self._send(path, body)
                if body is not None:
                    completion(reply)
                return reply
            except (OSError, http.client.HTTPException, ValueError, BadReplyError) as error:
                reason = _reason(error)
                final = isinstance(error, urllib.error.HTTPError) and error.code not in _TRY_AGAIN
            if final or attempt == self._retries or stopped.wait(wait):
                break
            with self._lock:
                self.counts.retries += 1
            wait = min(2 * wait, _LONGEST_WAIT)
        tries = "" if final else f" ({attempt + 1} tries)"
        raise UserError(f"--engine={self._url}: {reason}{tries}; --resume=auto continues with what was done")

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {os.environ[_KEY]}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=self._seconds) as reply:
            return json.loads(reply.read())

    def _model(self, wanted: str) -> str:
        reply = self._retried("models", None, threading.Event())
        entries = reply.get("data") if isinstance(reply, dict) else None
        names = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        if wanted and (wanted in names or not names):
            return wanted
        if not wanted and len(names) == 1 and isinstance(names[0], str):
            return names[0]
        found = ", ".join(map(str, names)) or "none"
        flag = f"--engine_model={wanted}" if wanted else "--engine_model is empty"
        raise UserError(f"--engine={self._url}: {flag}, and the models of the server are: {found:.200}")


def _reason(error: Exception) -> str:
    """One line about a failed request."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            try:
                text = error.read(4096).decode("utf-8", "replace")
            except OSError:
                text = ""
        named = any(field in text for field in NEUTRAL)
        hint = " (--omit_neutral leaves out the fields that are not OpenAI's)" if named else ""
        return f"status {error.code}: {_line(text) or error.reason}{hint}"
    if isinstance(error, urllib.error.URLError):
        return _line(str(error.reason))
    if isinstance(error, TimeoutError):
        return "no reply in time (--request_seconds)"
    if isinstance(error, BadReplyError):
        return f"not a completion: {_line(str(error))}"
    if isinstance(error, ValueError):
        return f"the reply is not JSON: {_line(str(error))}"
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_MESSAGE]
