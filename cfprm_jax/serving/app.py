"""The ASGI application: routes, limits, and what a client that leaves has cancelled.

The event loop reads and writes; one thread parses requests and makes tokens of them, and another
(:mod:`cfprm_jax.serving.worker`) owns the device.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import hmac
import json
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.prefix_rows import Tokens
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.serving import answers, requests
from cfprm_jax.serving.batching import BatchPolicy
from cfprm_jax.serving.errors import RequestError
from cfprm_jax.serving.metrics import CONTENT_TYPE, Metrics
from cfprm_jax.serving.sequences import SequenceEncoder
from cfprm_jax.serving.worker import Worker

_T = TypeVar("_T")

_OPEN = ("/health",)
"""Routes without a token: those that an orchestrator probes."""

# Status of clients that have disconnected, for the metrics.
_LEFT = 499


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request may take.

    Attributes:
      queue: requests that are answered at one time.
      body_bytes, body_seconds: of a request's body, and until it is there.
      depth: nesting of its JSON.
      sequences: solutions of one request.
    """

    queue: int = 256
    body_bytes: int = 16 << 20
    body_seconds: float = 60.0
    depth: int = 16
    sequences: int = 4096


class Service:
    """One PRM behind the application.

    Attributes:
      name: of the model, for clients.
      scorer: what the worker scores with.
      worker: the scorer's thread.
      draining: whether new requests are refused.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedPRM,
        scorer: PrefixScorer,
        *,
        policy: BatchPolicy,
        limits: Limits | None = None,
        token: str = "",
    ) -> None:
        """Starts the threads; :meth:`close` ends them.

        Args:
          token: a bearer token that every request but /health must have; empty is none.
        """
        self.name, self.limits = name, limits or Limits()
        self.scorer, self.worker = scorer, Worker(scorer, policy)
        self.draining = False
        self._encoder = SequenceEncoder(loaded, scorer.encoder, self.limits.sequences)
        self._encoding = concurrent.futures.ThreadPoolExecutor(1, "encoder")
        self._token, self._created, self._inside = token.encode(), int(time.time()), 0
        self._metrics = Metrics(scorer, self.worker, lambda: self._inside)

    def close(self, seconds: float | None = None) -> None:
        """Finish the requests that were accepted, waiting at most `seconds`, and end the threads."""
        self.draining = True
        self._encoding.shutdown(cancel_futures=True)
        self.worker.close(seconds)

    def app(self) -> Starlette:
        """The ASGI application."""
        posts: dict[str, Callable[..., Any]] = {
            "/v1/steps": self._steps,
            "/pooling": self._pooling,
            "/classify": self._classify,
            "/worker_value_inference": self._value,
            "/get_worker_address": self._address,
        }
        gets: dict[str, Callable[..., Any]] = {
            "/v1/models": self._models,
            "/health": self._health,
            "/metrics": self._show_metrics,
        }
        routes = [
            Route(path, self._guarded(path, handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handler in handlers.items()
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _unforeseen})

    def _guarded(self, path: str, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The handler, with the token checked, errors as bodies, and the request counted."""

        async def handle(request: Request) -> Response:
            status = 500
            try:
                if path not in _OPEN:
                    self._authorise(request)
                response = await handler(request)
                status = response.status_code
                return response
            except RequestError as error:
                status = error.status
                return _json(error.body(), error.status, error.headers)
            except ClientDisconnect:
                status = _LEFT
                return Response(status_code=_LEFT)
            finally:
                self._metrics.requests.labels(path, status).inc()

        return handle

    def _authorise(self, request: Request) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if self._token and not (kind.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)):
            raise RequestError(401, "a bearer token is required", headers={"WWW-Authenticate": "Bearer"})

    async def _steps(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.steps_request)
        sequences, outputs = await self._outputs(request, parsed.model, lambda: self._encoder.steps(parsed))
        return _json(answers.steps(parsed, sequences, outputs))

    async def _pooling(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.pooling_request)
        sequences, outputs = await self._outputs(request, parsed.model, lambda: self._encoder.marked(parsed, "input"))
        return _json(answers.pooling(parsed, sequences, outputs, self._envelope("pool")))

    async def _classify(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.classify_request)
        sequences, outputs = await self._outputs(request, parsed.model, lambda: self._encoder.marked(parsed, "input"))
        return _json(answers.classify(parsed, sequences, outputs, self._envelope("classify")))

    async def _value(self, request: Request) -> Response:
        parsed = await self._parsed(request, requests.value_request)
        _, outputs = await self._outputs(request, parsed.model, lambda: self._encoder.marked(parsed, "input_str"))
        return _json(answers.value(parsed, outputs))

    async def _address(self, request: Request) -> Response:
        """Where OpenR's clients find the worker: here. An unknown model has no address, as at FastChat's controller."""
        name = await self._parsed(request, requests.address_request)
        return _json({"address": str(request.base_url).rstrip("/") if name == self.name else ""})

    async def _models(self, request: Request) -> Response:
        return _json(answers.models(self.name, self._created, self._encoder.max_length))

    async def _health(self, request: Request) -> Response:
        if self.worker.failure is not None:
            return _json({"status": "failed", "reason": "the scorer failed; the server's log has the reason"}, 503)
        return _json({"status": "draining"}, 503) if self.draining else _json({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}

    async def _parsed(self, request: Request, parse: Callable[[requests.Json], _T]) -> _T:
        """What parse makes of a request's body, of bounded size, depth and time.

        It is decoded and parsed in the thread that makes tokens: megabytes of JSON would hold up the event loop.
        """
        body = await self._body(request)
        depth = self.limits.depth
        return await asyncio.get_running_loop().run_in_executor(
            self._encoding, lambda: parse(requests.decode(body, depth))
        )

    async def _body(self, request: Request) -> bytes:
        """The bytes of a request's body."""
        most = self.limits.body_bytes
        too_large = RequestError(413, f"the body is over {most:,} bytes", headers={"Connection": "close"})
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            raise RequestError(
                408, f"the body was not there after {self.limits.body_seconds:g} s", headers={"Connection": "close"}
            ) from error
        return b"".join(parts)

    async def _outputs(
        self, request: Request, model: str | None, encode: Callable[[], list[Tokens]]
    ) -> tuple[list[Tokens], answers.Outputs]:
        """The sequences of a request and their outputs.

        Raises:
          RequestError: 404 for another model, 429 when the queue is full, 503 while draining; what encoding refuses.
          ClientDisconnect: the client has left; its request is not computed unless that has begun.
        """
        if model is not None and model != self.name:
            raise RequestError(404, f"the model {model!r:.200} is not served; {self.name!r} is", "model")
        if self.draining:
            raise RequestError(503, "the server is about to stop", headers={"Connection": "close"})
        if self._inside >= self.limits.queue:
            raise RequestError(
                429,
                f"{self._inside} requests are waiting, at most {self.limits.queue} may",
                headers={"Retry-After": "1"},
            )
        started = time.monotonic()
        self._inside += 1
        try:
            sequences = await asyncio.get_running_loop().run_in_executor(self._encoding, encode)
            job = self.worker.submit(sequences)
            outputs = await _unless_gone(request, job.future)
            self._metrics.seconds.labels(request.url.path).observe(time.monotonic() - started)
            return sequences, outputs
        finally:
            self._inside -= 1


async def _unless_gone(request: Request, future: concurrent.futures.Future) -> Any:
    """The future's result, or its cancellation and ClientDisconnect when the client leaves first."""
    result = asyncio.wrap_future(future)
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((result, left), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise ClientDisconnect
    finally:
        result.cancel()
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left


async def _left(request: Request) -> None:
    """Wait until the client closes the connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/v1/steps, /pooling, /classify, /worker_value_inference, /v1/models, /health, /metrics"
    message = f"{request.url.path[:200]} is none of {known}" if error.status_code == 404 else error.detail
    return _json(RequestError(error.status_code, message).body(), error.status_code, error.headers)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return _json(RequestError(500, "the server has an error; its log has the reason").body(), 500)


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII: a message may quote what has no UTF-8.
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")
