"""The serve command: from flags to a signal, in this process."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading

import jax
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import cfprm_jax
from cfprm_jax import flags, serve, synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2)


@pytest.fixture(scope="module")
def prm(tmp_path_factory):
    world = synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)
    directory = tmp_path_factory.mktemp("export") / "prm"
    config = PRMConfig(loading.read_config(world.model)[0])
    params, tokenizer = init_params(config, jax.random.key(0)), load_tokenizer(world.model)
    loading.export(
        directory, params, config, tokenizer, EncodingConfig(max_length=96, system_prompt=""), dtype="float32"
    )
    return directory


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def run(*arguments: str) -> int:
    return flags.run(serve.ServeConfig, serve.main, ["serve", "--compile_cache_dir=", *arguments])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_sigterm_ends_it_with_status_0(prm, capsys, monkeypatch) -> None:
    port, answers, ended = free_port(), [], threading.Event()
    monkeypatch.setenv("CFPRM_API_KEY", "key")

    def ask(path: str, body: dict | None) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, {"Authorization": "Bearer key"})
        return json.loads(connection.getresponse().read())

    def client() -> None:
        try:
            # The socket listens before the model is read; connections wait for it.
            while not ended.is_set():
                try:
                    answers.append(ask("/v1/models", None))
                    break
                except ConnectionRefusedError:
                    continue
            answers.append(ask("/v1/steps", {"question": "four-one", "steps": ["four-one=three", "so=three"]}))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not to end the tests if the server has not begun
    thread.start()
    try:
        assert run(f"--model={prm}", f"--port={port}", "--served_model_name=tiny", "--warmup=false") == 0
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    models, steps = answers
    assert models["data"][0]["id"] == "tiny"
    assert steps["scores"] == pytest.approx(
        cfprm_jax.load(prm).score("four-one", ["four-one=three", "so=three"]), rel=1e-5
    )
    out = capsys.readouterr().out
    assert f"listening   http://127.0.0.1:{port} as 'tiny'" in out and "done        1 batches" in out
    assert "key" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --model"),
        (["--model=a", "--checkpoint=b"], "expected either --model"),
        (["--model=/nowhere"], "/nowhere: no such"),
        (["--port=70000"], "--port=70000"),
        (["--prefix_cache_tokens=-1"], "prefix_cache_tokens"),
        (["--model={prm}", "--host=203.0.113.7"], "--host=203.0.113.7"),
        (["--model={prm}", "--port={taken}"], "in use"),
        (["--model={prm}", "--max_length=5000"], "max_position_embeddings"),
    ],
)
def test_bad_flags_are_one_line(prm, capsys, arguments, message) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"prm": str(prm), "taken": taken.getsockname()[1]}
        assert run("--port=0", *(argument.format(**values) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
