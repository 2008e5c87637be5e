"""The serve command: from flags to a signal."""

from __future__ import annotations

import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import jax
import pytest
from exported_prm import export_random

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import cfprm_jax
from cfprm_jax import flags, serve, synthetic
from cfprm_jax.serving import server

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=2, solutions_per_problem=2, candidates_per_problem=2)


@pytest.fixture(scope="module")
def prm(tmp_path_factory):
    world = synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)
    return export_random(world.model, tmp_path_factory.mktemp("export") / "prm")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def run(*arguments: str) -> int:
    return flags.run(serve.ServeConfig, serve.main, ["serve", "--compile_cache_dir=", *arguments])


def test_sigterm_ends_it_with_status_0(prm) -> None:
    """A process of its own, whose signals are its own: from the line that names the port to the counts at the end."""
    given = [f"--model={prm}", "--port=0", "--served_model_name=tiny", "--mesh=data=1", "--compile_cache_dir="]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CFPRM_API_KEY": "secret", "XLA_FLAGS": ""}
    with subprocess.Popen(
        [sys.executable, "-m", "cfprm_jax.serve", *given],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            printed = []
            for line in process.stdout:
                printed.append(line)
                if line.startswith("listening"):
                    break
            assert printed and printed[-1].startswith("listening"), printed
            port = int(printed[-1].split("127.0.0.1:")[1].split()[0])

            def request(path: str, body: dict | None, key: str) -> tuple[int, dict]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
                content = None if body is None else json.dumps(body)
                connection.request("GET" if body is None else "POST", path, content, {"Authorization": f"Bearer {key}"})
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

            steps = {"question": "four-one", "steps": ["four-one=three", "so=three"]}
            assert request("/v1/steps", steps, "other")[0] == 401
            assert request("/v1/models", None, "secret")[1]["data"][0]["id"] == "tiny"
            status, scored = request("/v1/steps", steps, "secret")
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    text = "".join(printed) + rest
    assert process.returncode == 0 and status == 200, text
    assert scored["scores"] == pytest.approx(cfprm_jax.load(prm).score(*steps.values()), rel=1e-5)
    assert "done        1 batch," in text and "secret" not in text


def test_an_ipv6_address_is_shown_as_clients_write_it() -> None:
    with server.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server.address_of(listener, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert server.address_of(listener, "::1") == f"http://[::1]:{port}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --model"),
        (["--model=a", "--checkpoint=b"], "expected either --model"),
        (["--model=/nowhere"], "/nowhere is not a directory"),
        (["--port=70000"], "--port=70000"),
        (["--prefix_cache_tokens=-1"], "prefix_cache_tokens"),
        (["--model={prm}", "--host=203.0.113.7"], "--host=203.0.113.7"),
        (["--model={prm}", "--host=a..b"], "--host=a..b --port=0: no name or address"),
        (["--model={prm}", "--port={taken}"], "in use"),
        (["--model={prm}", "--max_length=1000000"], "max_position_embeddings"),
    ],
)
def test_bad_flags_are_one_line(prm, capsys, arguments, message) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"prm": str(prm), "taken": taken.getsockname()[1]}
        assert run("--port=0", *(argument.format(**values) for argument in arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
