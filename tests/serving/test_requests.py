"""Bodies that cost more than they should: the memory and the depth of JSON, whatever a client puts into it."""

from __future__ import annotations

import contextlib
import json
import threading
import tracemalloc

import pytest

from cfprm_jax.serving import requests
from cfprm_jax.serving.errors import RequestError

MIB = 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "' + b"x" * MIB + b'"}',
        b'{"input": "' + b"\\\\" * (MIB // 2) + b'"}',
        b'{"input": "' + b"[" * MIB + b'"}',
        b'{"input": [' + b'"", ' * (MIB // 4) + b'""]}',
        b"[" * MIB,
        b"[]" * (MIB // 2),
        b'"' * MIB,
    ],
    ids=["text", "escapes", "brackets in a text", "texts", "deep", "brackets", "quotes"],
)
def test_memory_is_a_small_multiple_of_the_body(body) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(RequestError):
            requests.decode(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(body)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        (r'{"a": "[[["}', 1),
        (r'{"a": "\"[[["}', 1),
        (r'{"a": "\\", "b": [["["]]}', 3),
        (r'{"a": "\\\"[[", "b": [1]}', 2),
        (r'{"a": [], "b": [], "c": {"d": []}}', 3),
        (r'{"a\\": {"\\\\": "{"}}', 2),
    ],
)
def test_depth_is_that_of_brackets_outside_of_texts(text, depth) -> None:
    assert requests.decode(text.encode(), depth) == json.loads(text)
    with pytest.raises(RequestError, match=f"nested {depth} deep, at most {depth - 1} is allowed"):
        requests.decode(text.encode(), depth - 1)


def test_a_text_that_does_not_end_and_one_of_many_quotes() -> None:
    with pytest.raises(RequestError, match="not JSON"):
        requests.decode(b'{"a": "[[[[[[[[[[[[[[[[[[[[[[[[')
    # More quotes than a byte counts.
    assert len(requests.decode(json.dumps({"a": ["["] * 300}).encode(), 2)["a"]) == 300


def test_bodies_are_not_parsed_on_the_event_loop(client, monkeypatch) -> None:
    threads, decode = [], requests.decode

    def noted(*args):
        threads.append(threading.current_thread().name)
        return decode(*args)

    monkeypatch.setattr(requests, "decode", noted)
    for path in ("/v1/steps", "/pooling", "/classify", "/worker_value_inference", "/get_worker_address"):
        assert client.post(path, {}).status == 400
    assert len(threads) == 5 and all(name.startswith("encoder") for name in threads)
