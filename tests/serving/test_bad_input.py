"""Bad input of every kind: one JSON error in OpenAI's form, with what was found and expected; never a traceback."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest

GOOD = {"question": "q", "steps": ["a"]}


def refused(answer, status: int, *words: str) -> None:
    assert answer.status == status, answer
    error = answer.body["error"]
    assert error["code"] == status and error["type"].endswith("Error")
    for word in words:
        assert word in error["message"]
    assert "Traceback" not in json.dumps(answer.body) and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", ["not JSON"]),
        (b"{", ["not JSON"]),
        (b"[1]", ["a list", "JSON object"]),
        (b"null", ["null"]),
        (b"\xff\xfe", ["not"]),
        (b'{"question": "\\ud800", "steps": ["a"]}', ["Unicode"]),
        (b'{"question": NaN}', ["NaN"]),
        (b"[" * 50000, ["nested 50000 deep, at most 16"]),
        (b'{"question": ' + b"9" * 5000 + b"}", ["not JSON"]),
        ({}, ['"question" is missing']),
        ({"question": 1, "steps": ["a"]}, ['"question" is a number']),
        ({"question": "q"}, ['"steps"', '"solutions"']),
        ({**GOOD, "solutions": [["a"]]}, ["one of"]),
        ({"question": "q", "steps": []}, ["empty"]),
        ({"question": "q", "steps": "a"}, ["a string"]),
        ({"question": "q", "steps": ["a", None]}, ['"steps"[1] is null']),
        ({"question": "q", "solutions": [["a"], [2]]}, ['"solutions"[1][0] is a number']),
        ({"question": "q", "solutions": [[]]}, ['"solutions"[0] is empty']),
        ({"question": "q", "solutions": {}}, ['"solutions" is empty']),
        ({**GOOD, "stepz": 1}, ["'stepz'", "fields are"]),
        ({**GOOD, "logits": "yes"}, ['"logits" is a string']),
        ({**GOOD, "model": 3}, ['"model" is a number']),
    ],
)
def test_steps(client, body, words) -> None:
    refused(client.post("/v1/steps", body), 400, *words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ['"input"', '"messages"']),
        ({"input": []}, ['"input" is empty']),
        ({"input": ["a", 1]}, ['"input" is a list']),
        ({"input": [True]}, ['"input" is a list']),
        ({"input": [[]]}, ['"input" is a list']),
        ({"input": "no marker"}, ["no marker", "'<extra_0>'"]),
        ({"input": ""}, ["no marker"]),
        ({"input": [10**9]}, ["token id 1000000000"]),
        ({"input": [-1]}, ["token id -1"]),
        ({"input": "a", "task": "embed"}, ["'embed'", "token_classify"]),
        ({"input": "a", "encoding_format": "base64"}, ["base64"]),
        ({"input": "a", "truncate_prompt_tokens": 0}, ["truncate_prompt_tokens"]),
        ({"input": "a", "truncation_side": "middle"}, ["truncation_side", "'middle'"]),
        ({"input": "a", "use_activation": 1}, ['"use_activation" is a number']),
        ({"input": "a", "use_activation": True, "activation": False}, ["differ"]),
        ({"input": "a", "dimensions": 3}, ["'dimensions'"]),
        ({"messages": []}, ['"messages" is empty']),
        ({"messages": [{"role": "user"}]}, ['"messages"[0]']),
        ({"messages": [{"role": "user", "content": "q"}], "add_generation_prompt": True}, ["add_generation_prompt"]),
    ],
)
def test_pooling(client, body, words) -> None:
    refused(client.post("/pooling", body), 400, *words)


@pytest.mark.parametrize("body", [{}, {"input_str": []}, {"input_str": [1]}, {"input_str": "a", "Q": "b"}])
def test_openr(client, body) -> None:
    refused(client.post("/worker_value_inference", body), 400)


def test_too_much(client, solutions) -> None:
    long = {"question": "one", "steps": ["one+two=three"] * 60}
    refused(client.post("/v1/steps", long), 413, "the model's 96 tokens", "of its 60 steps fit")
    refused(client.post("/pooling", {"input": [3] * 97}), 413, "97 tokens", "at most 96")
    refused(client.post("/v1/steps", {"question": "q", "solutions": [["a"]] * 9}), 413, "9 solutions", "at most 8")
    refused(client.post("/v1/steps", {"question": "x" * (1 << 16), "steps": ["a"]}), 413, "65,536 bytes")


def test_a_body_that_does_not_announce_its_size(client) -> None:
    with socket.create_connection(("127.0.0.1", client.port)) as raw:
        raw.sendall(b"POST /v1/steps HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.sendall((b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 5)
        assert b"413" in raw.recv(1 << 16).split(b"\r\n")[0]


def test_what_is_not_here(client) -> None:
    refused(client.post("/v1/steps", {**GOOD, "model": "other"}), 404, "'other'", "'tiny'")
    refused(client.post("/v1/completions", {}), 404, "/v1/completions", "/pooling")
    refused(client.get("/pooling"), 405)


def test_a_token(make_service, serve) -> None:
    with serve(make_service(token="geheim")) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "geheim"}):
            answer = client.post("/v1/steps", GOOD, **headers)
            refused(answer, 401, "bearer token")
            assert answer.headers["www-authenticate"] == "Bearer"
            refused(client.get("/metrics", **headers), 401)
        assert client.get("/v1/models", Authorization="Bearer geheim").status == 200
        assert client.get("/health").status == 200


class Broken:
    """A scorer that fails, or waits to be let through."""

    def __init__(self, scorer, fault: str) -> None:
        self._scorer, self._fault = scorer, fault
        self.began, self.let = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._scorer, name)

    def outputs(self, sequences):
        self.began.set()
        if self._fault == "device":
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nsecret")
        if self._fault == "wait":
            self.let.wait()
        outputs = self._scorer.outputs(sequences)
        return [np.full_like(z, np.nan) for z in outputs] if self._fault == "nan" else outputs


def test_an_error_of_the_device_turns_health_red(make_service, serve, client, capfd) -> None:
    broken = Broken(client.service.scorer, "device")
    with serve(make_service(broken)) as other:
        answer = other.post("/v1/steps", GOOD)
        refused(answer, 500, "the scorer failed")
        assert "secret" not in json.dumps(answer.body)
        assert other.get("/health").status == 503
        assert "cfprm_healthy 0.0" in other.get("/metrics").body
    assert "RESOURCE_EXHAUSTED" in capfd.readouterr().err


def test_a_score_that_is_not_finite(make_service, serve, prm) -> None:
    from cfprm_jax.inference.prefix_scorer import PrefixScorer

    with serve(make_service(Broken(PrefixScorer(prm, 64), "nan"))) as other:
        refused(other.post("/v1/steps", GOOD), 500, "not finite")
        assert other.get("/health").status == 200


def test_a_full_queue(make_service, serve, prm) -> None:
    from cfprm_jax.inference.prefix_scorer import PrefixScorer

    broken = Broken(PrefixScorer(prm, 64), "wait")
    with serve(make_service(broken, queue=1)) as other:
        found = []
        first = threading.Thread(target=lambda: found.append(other.post("/v1/steps", GOOD)))
        first.start()
        broken.began.wait()
        answer = other.post("/v1/steps", GOOD)
        refused(answer, 429, "1 requests are waiting")
        assert answer.headers["retry-after"] == "1"
        broken.let.set()
        first.join()
        assert found[0].status == 200


def test_draining_answers_what_has_come_in(make_service, serve, prm) -> None:
    from cfprm_jax.inference.prefix_scorer import PrefixScorer

    broken = Broken(PrefixScorer(prm, 64), "wait")
    found = []
    with serve(make_service(broken)) as other:
        first = threading.Thread(target=lambda: found.append(other.post("/v1/steps", GOOD)))
        first.start()
        broken.began.wait()
        other.service.draining = True
        refused(other.post("/v1/steps", GOOD), 503, "about to stop")
        assert other.get("/health").status == 503
        broken.let.set()
    first.join()
    assert found[0].status == 200
