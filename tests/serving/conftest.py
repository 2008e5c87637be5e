"""A server of a tiny PRM on a real socket."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from cfprm_jax import synthetic
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.encoding import load_tokenizer
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.loaded import LoadedPRM
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.inference.scorer import Scorer
from cfprm_jax.models.config import PRMConfig
from cfprm_jax.models.parameters import init_params
from cfprm_jax.serving.app import Limits, Service
from cfprm_jax.serving.batching import BatchPolicy
from cfprm_jax.serving.server import Server, listen

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=3, solutions_per_problem=2, candidates_per_problem=8)


@pytest.fixture(scope="session")
def prm(tmp_path_factory) -> LoadedPRM:
    """A PRM with random weights, one layer, for up to 96 tokens."""
    world = synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)
    backbone, _ = loading.read_config(world.model)
    config = PRMConfig(dataclasses.replace(backbone, num_hidden_layers=1, initializer_range=0.3))
    encoding = EncodingConfig(max_length=96, system_prompt="")
    params = init_params(config, jax.random.key(0))
    return LoadedPRM(config, params, load_tokenizer(world.model), encoding, {"candidates": world.candidates})


@pytest.fixture(scope="session")
def solutions(prm) -> list[tuple[str, list[str]]]:
    return [(q.question, list(c.steps)) for q in read_candidates(prm.meta["candidates"]) for c in q.candidates]


@pytest.fixture(scope="session")
def expected(prm, solutions) -> list[Any]:
    """Step logits of the packed scorer."""
    return Scorer(prm, batch_rows=1).score(solutions)


class Answer(NamedTuple):
    """A response."""

    status: int
    body: Any
    headers: http.client.HTTPMessage


@dataclasses.dataclass
class Client:
    """One request a connection."""

    port: int
    service: Service

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.send("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def get(self, path: str, **headers: str) -> Answer:
        return self.send("GET", path, None, headers)

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
            kind = response.headers.get("content-type", "")
            return Answer(
                response.status, json.loads(content) if "json" in kind else content.decode(), response.headers
            )
        finally:
            connection.close()


@contextlib.contextmanager
def serving(service: Service) -> Iterator[Client]:
    """The service on a free port."""
    listener, server = listen("127.0.0.1", 0), Server(service, drain_seconds=30)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Client(listener.getsockname()[1], service)
    finally:
        server.should_exit = True
        thread.join()
        service.close()


@pytest.fixture(scope="session")
def make_service(prm):
    """Makes a service of the PRM, whose compiled shapes all share."""

    def make(scorer: Any = None, token: str = "", cache: int = 1 << 12, **limits: Any) -> Service:
        scorer = scorer or PrefixScorer(prm, cache, batch_tokens=1024)
        return Service("tiny", prm, scorer, policy=BatchPolicy(512, 0.002), limits=Limits(**limits), token=token)

    return make


@pytest.fixture(scope="session")
def client(make_service) -> Iterator[Client]:
    with serving(make_service(sequences=8, body_bytes=1 << 16)) as client:
        yield client


@pytest.fixture(scope="session")
def serve():
    """Puts a service on a free port inside a with block."""
    return serving
