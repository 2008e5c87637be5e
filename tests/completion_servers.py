"""A real HTTP server with OpenAI's completions, and a policy of the synthetic world behind it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cfprm_jax.synthetic import judge
from cfprm_jax.synthetic.world import DAYS

MODELS = {"data": [{"id": "scripted"}]}
Handler = Callable[[dict[str, Any]], tuple[int, Any]]
"""Body of a request to status and reply: an object, or bytes as they are."""


@contextlib.contextmanager
def serving(handler: Handler, models: Any = MODELS, path: str = "/v1/completions") -> Iterator[str]:
    """The URL of a server; a reply of None closes the connection without one."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == path, self.path
            self._reply(*handler(body))

        def _reply(self, status: int, content: Any) -> None:
            if content is None:
                self.close_connection = True
                return
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 1024

        def handle_error(self, *_: Any) -> None:  # a client that leaves early is no fault of the server's
            pass

    server = Server(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(text: str, tokens: int = 5, finish: str = "stop") -> dict[str, Any]:
    """A completion."""
    return {"choices": [{"text": text, "finish_reason": finish}], "usage": {"completion_tokens": tokens}}


class WorldPolicy:
    """Solves a problem of the synthetic world: from a prefix that is right, with a probability; else never.

    Attributes:
      requests: (question, steps so far, seed) of each request.
    """

    def __init__(self, tokenizer: Any, rate: float = 0.6) -> None:
        self._tokenizer, self._rate = tokenizer, rate
        self.requests: list[tuple[str, tuple[str, ...], int]] = []

    def __call__(self, body: dict[str, Any]) -> tuple[int, Any]:
        """The reply to a request."""
        text = self._tokenizer.decode(body["prompt"])
        question, _, written = text.rpartition("<|user|>")[2].partition("<|solution|>")
        assert not written or written.endswith("\n\n"), written
        steps = [step for step in written.split("\n\n") if step]
        self.requests.append((question, tuple(steps), body["seed"]))
        problem = judge.parse_problem(question)
        assert problem is not None and body["n"] == 1 and body["model"] == "scripted"
        right = not steps or judge.judge(problem, steps).labels[-1] == 1
        succeeds = right and np.random.default_rng(body["seed"]).random() < self._rate
        made: list[str] = []
        while succeeds and not (made and made[-1].startswith("answer")):
            made.append(judge.true_step(problem, [*steps, *made]))
        if not made:
            made = ["so", f"answer={DAYS[(problem.answer + 1) % 7]}"]
        return 200, reply("\n\n".join(made), tokens=4 * len(made))
