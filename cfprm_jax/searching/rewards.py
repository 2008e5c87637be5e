"""Step scores for a search: of a PRM in this process, or of a server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np

from cfprm_jax.errors import UserError
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.searching.methods import Logits


class PRMReward:
    """A PRM of this process, which keeps what it computed; implements StepReward."""

    def __init__(self, scorer: PrefixScorer) -> None:
        self._scorer, self.calls = scorer, 0

    @property
    def computed(self) -> int:
        """Tokens that the network processed."""
        return self._scorer.counts.computed

    @property
    def requested(self) -> int:
        """Tokens of all solutions that were scored."""
        return self._scorer.counts.requested

    def score(self, question: str, solutions: Sequence[Sequence[str]]) -> list[Logits]:
        """Step logits; None for a solution without steps or over the model's max_length."""
        self.calls += 1
        found = self._scorer.score([(question, steps) for steps in solutions])
        for z in found:
            if z is not None and not np.isfinite(z).all():
                raise UserError("the PRM gives a score that is not finite")
        return found


class ServerReward:
    """A server of /v1/steps; implements StepReward. How much was cached is not known: computed is requested.

    Attributes:
      model: name of the only model that the server lists, which requests then ask for; None if it lists none.
    """

    def __init__(self, url: str, token: str = "", attempts: int = 8) -> None:
        """Raises UserError when url is none, or no server is there."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--reward={url} is no http:// or https:// address")
        self._url, self._token, self._attempts = url.rstrip("/") + "/v1/steps", token, attempts
        self.computed = self.requested = self.calls = 0
        self.model = self._listed(url.rstrip("/") + "/v1/models")

    def score(self, question: str, solutions: Sequence[Sequence[str]]) -> list[Logits]:
        """Step logits; None for a solution without steps, and for one that the server calls too long.

        Raises:
          UserError: the server refuses a request for another reason, or does not answer.
        """
        self.calls += 1
        whole = [i for i, steps in enumerate(solutions) if len(steps)]
        found: list[Logits] = [None] * len(solutions)
        answered = self._ask(question, [list(solutions[i]) for i in whole]) if whole else []
        if answered is None:  # one of them is too long; the server names one, the others have an answer
            for i in whole:
                alone = self._ask(question, [list(solutions[i])])
                found[i] = None if alone is None else alone[0]
            return found
        for i, z in zip(whole, answered, strict=True):
            found[i] = z
        return found

    def _ask(self, question: str, solutions: list[list[str]]) -> list[np.ndarray] | None:
        """Step logits of each, or None where the status is 413."""
        named = {} if self.model is None else {"model": self.model}
        body = json.dumps({"question": question, "solutions": solutions, "logits": True, **named}).encode()
        for attempt in range(self._attempts):
            try:
                with urllib.request.urlopen(self._request(self._url, body), timeout=600) as response:
                    answer = json.load(response)
                return self._logits(answer, solutions)
            except urllib.error.HTTPError as error:
                if error.code == 413:
                    return None
                if error.code != 429 or attempt == self._attempts - 1:
                    raise UserError(f"{self._url}: status {error.code}: {error.read()[:300]!r}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise UserError(f"{self._url}: {error}") from error
            time.sleep(min(2.0**attempt / 4, 10.0))
        raise AssertionError

    def _listed(self, url: str) -> str | None:
        """The name of the server's model; a server of scores need not list any."""
        try:
            with urllib.request.urlopen(self._request(url, None), timeout=600) as response:
                entries = json.load(response)["data"]
            names = [entry["id"] for entry in entries]
        except (urllib.error.HTTPError, ValueError, KeyError, TypeError):
            return None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{url}: {error}") from error
        return names[0] if len(names) == 1 and isinstance(names[0], str) else None

    def _request(self, url: str, body: bytes | None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return urllib.request.Request(url, body, headers)

    def _logits(self, answer: Any, solutions: list[list[str]]) -> list[np.ndarray]:
        try:
            found = [np.array(z, np.float32) for z in answer["logits"]]
            tokens = int(answer["usage"]["total_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self._url}: the answer has no logits and usage: {str(answer)[:200]!r}") from error
        if [z.shape for z in found] != [(len(steps),) for steps in solutions]:
            raise UserError(f"{self._url}: the answer has other numbers of steps than the request")
        # null is read as NaN, too.
        if not all(np.isfinite(z).all() for z in found):
            raise UserError(f"{self._url}: the answer has a score that is not finite")
        self.computed += tokens
        self.requested += tokens
        return found
