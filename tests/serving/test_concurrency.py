"""Many clients at once, some of which leave in the middle: no answer is lost or another's."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket

import numpy as np

from cfprm_jax.inference.rows import sigmoid


def test_no_answer_is_lost_or_mixed_up(client, solutions, expected) -> None:
    wanted = [sigmoid(z) for z in expected]

    def request(seed: int) -> int:
        generator = random.Random(seed)
        answered = 0
        for _ in range(6):
            i = generator.randrange(len(solutions))
            question, steps = solutions[i]
            kept = generator.randint(1, len(steps))
            body = {"question": question, "steps": steps[:kept]}
            if generator.random() < 0.4:
                leave(client.port, json.dumps(body).encode(), generator.random() < 0.5)
                continue
            answer = client.post("/v1/steps", body)
            assert answer.status == 200
            np.testing.assert_allclose(answer.body["scores"], wanted[i][:kept], rtol=1e-5, atol=1e-6)
            answered += 1
        return answered

    with concurrent.futures.ThreadPoolExecutor(12) as clients:
        assert sum(clients.map(request, range(24))) > 50
    assert client.get("/health").status == 200
    # The requests of clients that left are gone in the end, too.
    assert any("cfprm_waiting_requests 0.0" in client.get("/metrics").body for _ in range(1000))


def leave(port: int, body: bytes, whole: bool) -> None:
    """Send a request, or half of one, and close the connection."""
    with socket.create_connection(("127.0.0.1", port)) as raw:
        head = f"POST /v1/steps HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        raw.sendall(head + (body if whole else body[: len(body) // 2]))
