"""Completions of a server: requests, seeds, retries, and one line for whatever fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from completion_servers import reply, serving

from cfprm_jax.engines.server import ServerEngine
from cfprm_jax.errors import UserError
from cfprm_jax.inference.sampler import Prompt, Sampling

PROMPTS = [Prompt(f"q{number}", np.array([number, 7], np.int32)) for number in range(5)]


def engine(url, retries=3, seconds=30.0, model="", concurrency=4, omit_neutral=False, log=print, **sampling):
    options = Sampling(**{"temperature": 0.7, "max_new_tokens": 9, **sampling})
    return ServerEngine(
        url,
        model,
        options,
        concurrency=concurrency,
        seconds=seconds,
        retries=retries,
        first_wait=0.001,
        omit_neutral=omit_neutral,
        log=log,
    )


def echo(body):
    return 200, reply(f"{body['prompt']} {body['seed']}")


def texts(found):
    return {place: [made.text for made in completions] for place, completions in found}


def test_every_prompt_comes_back_with_all_of_its_completions() -> None:
    bodies = []

    def handler(body):
        bodies.append(body)
        return echo(body)

    with serving(handler) as url:
        one = engine(url, top_k=5, top_p=0.9)
        found = texts(one.complete(PROMPTS, 3))
    assert one.name == "scripted" and sorted(found) == [0, 1, 2, 3, 4]
    assert all(text.startswith(f"[{place}, 7] ") for place, made in found.items() for text in made)
    assert len({text for made in found.values() for text in made}) == 15
    counts = one.counts
    assert (counts.completions, counts.tokens, counts.prompt_tokens, counts.prefilled) == (15, 75, 30, None)
    assert {key: bodies[0][key] for key in ("model", "max_tokens", "temperature", "top_p", "top_k", "n")} == {
        "model": "scripted", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
        ({"top_k": 5}, {"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.0}),
        ({"omit_neutral": True}, {}),
        ({"omit_neutral": True, "top_k": 5}, {"top_k": 5}),
    ],
)
def test_requests_leave_nothing_to_the_defaults_of_the_served_model(options, sent) -> None:
    """vLLM and SGLang take what is missing from its generation_config.json."""
    bodies = []

    def handler(body):
        bodies.append(body)
        return echo(body)

    with serving(handler) as url:
        texts(engine(url, **options).complete(PROMPTS[:1], 1))
    assert {
        name: value for name, value in bodies[0].items() if name in ("top_k", "min_p", "repetition_penalty")
    } == sent


@pytest.mark.parametrize(("tokens", "finish", "noted"), [(8, "length", 1), (9, "length", 0), (8, "stop", 0)])
def test_a_limit_of_the_server_is_noted_once(tokens, finish, noted) -> None:
    lines: list[str] = []
    with serving(lambda body: (200, reply("a", tokens, finish))) as url:
        one = engine(url, log=lines.append)
        texts(one.complete(PROMPTS, 2))
        one.replies([one.form(Sampling(max_new_tokens=9)).body(PROMPTS[0], 0)])
    assert len(lines) == noted
    assert all("cut after 8 tokens of the 9" in line and "--generation-config vllm" in line for line in lines)


def test_fewer_completions_are_the_first_ones_and_the_seed_changes_all() -> None:
    with serving(echo) as url:
        eight, four = texts(engine(url).complete(PROMPTS, 8)), texts(engine(url).complete(PROMPTS[::-1], 4))
        other = texts(engine(url, seed=1).complete(PROMPTS, 8))
    assert [made[:4] for _, made in sorted(eight.items())] == [made for _, made in sorted(four.items(), reverse=True)]
    assert not {t for made in eight.values() for t in made} & {t for made in other.values() for t in made}


@pytest.mark.parametrize(
    "broken",
    [
        (503, b"busy"),
        (200, b"<html>"),
        (200, {"choices": []}),
        (200, {"choices": [{"text": None, "finish_reason": "stop"}]}),
        (200, {"choices": [{"text": "a", "finish_reason": "tool"}]}),
        (200, {"choices": [{"text": "a", "finish_reason": "stop"}]}),
        (200, None),
    ],
)
def test_what_fails_at_first_is_sent_again(broken) -> None:
    seen, lock = set(), threading.Lock()

    def handler(body):
        with lock:
            first = body["seed"] not in seen
            seen.add(body["seed"])
        return broken if first else echo(body)

    with serving(handler) as url:
        one = engine(url)
        assert len(texts(one.complete(PROMPTS, 2))) == 5
    assert one.counts.retries == 10


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((503, b"out of\nmemory"), "status 503: out of memory (3 tries)"),
        ((400, {"error": "prompt too long"}), 'status 400: {"error": "prompt too long"}'),
        ((400, {"error": "unknown min_p"}), "min_p\"} (--omit_neutral leaves out the fields that are not OpenAI's)"),
        ((200, b"<html>"), "the reply is not JSON: Expecting value"),
        ((200, {"text": "x"}), "not a completion: expected one choice, found {'text': 'x'} (3 tries)"),
    ],
)
def test_what_keeps_failing_is_one_line_and_loses_nothing(answer, message) -> None:
    with serving(lambda body: echo(body) if body["prompt"][0] < 3 else answer) as url:
        found = []
        with pytest.raises(UserError) as error:
            found.extend(engine(url, retries=2, concurrency=1).complete(PROMPTS, 2))
    assert sorted(texts(found)) == [0, 1, 2]
    assert message in str(error.value) and "\n" not in str(error.value)
    assert "--resume=auto continues" in str(error.value) and str(error.value).startswith(f"--engine={url}: ")


def test_a_reply_that_does_not_come_is_given_up() -> None:
    done = threading.Event()

    def handler(body):
        done.wait()
        return 200, None

    with serving(handler) as url:
        one = engine(url, retries=1, seconds=0.1)
        try:
            with pytest.raises(UserError, match=r"no reply in time \(--request_seconds\) \(2 tries\)"):
                list(one.complete(PROMPTS[:1], 1))
        finally:
            done.set()


def test_a_server_that_is_not_there() -> None:
    with serving(echo) as url:
        pass
    with pytest.raises(UserError, match="refused"):
        engine(url, retries=0)
    with pytest.raises(UserError, match="is not http://HOST:PORT/v1"):
        engine("localhost:8000")


def test_which_model() -> None:
    two = {"data": [{"id": "a"}, {"id": "b"}]}
    with serving(echo, two) as url:
        assert engine(url, model="b").name == "b"
        with pytest.raises(UserError, match="--engine_model is empty, and the models of the server are: a, b"):
            engine(url)
        with pytest.raises(UserError, match="--engine_model=c, and the models of the server are: a, b"):
            engine(url, model="c")


def test_who_stops_listening_ends_the_requests() -> None:
    with serving(echo) as url:
        stream = engine(url, concurrency=1).complete(PROMPTS * 40, 1)
        next(stream)
        stream.close()


def test_nothing_waits_for_replies_after_an_exception() -> None:
    released = threading.Event()

    def handler(body):
        if body["prompt"][0]:
            released.wait()
        return echo(body)

    with serving(handler) as url:
        stream = engine(url, seconds=600, concurrency=4).complete(PROMPTS, 1)
        try:
            assert next(stream)[0] == 0
            with pytest.raises(KeyboardInterrupt):
                stream.throw(KeyboardInterrupt)
            waiting = [thread for thread in threading.enumerate() if thread.name == "request"]
            assert waiting and all(thread.daemon for thread in waiting)
        finally:
            released.set()
        for thread in waiting:
            thread.join()


INTERRUPTED = """
import signal
import sys
import numpy as np
from cfprm_jax.engines.server import ServerEngine
from cfprm_jax.inference.sampler import Prompt, Sampling

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
engine = ServerEngine(sys.argv[1], "", Sampling(max_new_tokens=9), concurrency=2, seconds=600, retries=0)
if sys.argv[2] == "complete":
    list(engine.complete([Prompt("q", np.array([1], np.int32))] * 5, 1))
else:
    engine.replies([{"max_tokens": 1}] * 5)
"""


@pytest.mark.parametrize("call", ["complete", "replies"])
def test_ctrl_c_ends_a_process_that_waits_for_a_server(call) -> None:
    asked, released = threading.Event(), threading.Event()

    def handler(body):
        asked.set()
        released.wait()
        return 200, None

    with serving(handler) as url:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, url, call], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        try:
            assert asked.wait(300)
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in process.communicate(timeout=120)[1]
            assert process.returncode == -signal.SIGINT
        finally:
            released.set()
            process.kill()
            process.wait()
