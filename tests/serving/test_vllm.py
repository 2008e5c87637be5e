"""Exports in a real `vllm serve`: the card's command and code give the scores of `score`, and `serve` answers alike."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from typing import Any, NamedTuple

import numpy as np
import pytest
import vllm_server
from model_fixtures import random_params, tiny_tokenizer  # noqa: F401

import cfprm_jax
from cfprm_jax.config import EncodingConfig
from cfprm_jax.data.encoding import Encoder, marker_id
from cfprm_jax.huggingface import loading
from cfprm_jax.inference.load import PRM, open_prm
from cfprm_jax.inference.prefix_scorer import PrefixScorer
from cfprm_jax.models.config import BackboneConfig, PRMConfig
from cfprm_jax.models.rope_scaling import Llama3Scaling
from cfprm_jax.run import model_card, training_record
from cfprm_jax.serving.app import Service
from cfprm_jax.serving.batching import BatchPolicy

QUESTION, STEPS = "What is 2 + 3 * 4?", ["First, 3 * 4 = 12.", "Then 2 + 12 = 14. The answer is \\boxed{14}."]
SOLUTIONS = [(f"What is {n} + {n * n}?", [f"{n * n} + {n - k}" * (k + 1) for k in range(n)]) for n in range(1, 6)]
SWITCHES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 64)},
    "mistral": {},
}
FLOAT32_TOLERANCE = 1e-5


class Case(NamedTuple):
    """An export, and how vLLM is started on it."""

    family: str
    format: str
    dtype: str = "float32"
    redundancy: bool = False
    pooling: str = "STEP"

    def __str__(self) -> str:
        return "-".join([*self[:3], *(["redundancy"] if self.redundancy else []), self.pooling])


# Starting a server takes most of the time, so a case has each format and dtype once, and the families, the redundancy
# output and ALL pooling (what versions before 0.30.0 answer for token_classification) share the cases of that format.
CASES = [
    Case("qwen2", "process_reward_model"),
    Case("qwen2", "process_reward_model", "bfloat16"),
    Case("qwen2", "reward_model", pooling="ALL"),
    Case("qwen2", "reward_model", "bfloat16", pooling="ALL"),
    Case("qwen2", "token_classification"),
    Case("qwen3", "token_classification", redundancy=True),
    Case("llama", "token_classification"),
    Case("llama", "token_classification", "bfloat16"),
    Case("mistral", "token_classification", pooling="ALL"),
]


class Served(NamedTuple):
    """vLLM with an export.

    Attributes:
      prm: the export, computed in float32.
      tolerance: of vLLM's scores from those of prm. In bfloat16, twice the largest rounding error of this project's own
        bfloat16 scores of SOLUTIONS.
    """

    case: Case
    directory: Any
    port: int
    card: str
    prm: PRM
    tolerance: float

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module", params=CASES, ids=str)
def served(request, random_params, tiny_tokenizer, tmp_path_factory):  # noqa: F811
    """vLLM, started by the command of the card."""
    vllm_server.program()
    case: Case = request.param
    backbone = BackboneConfig(
        300,
        128,
        96,
        2,
        4,
        2,
        32,
        1e-5,
        1e4,
        model_type=case.family,
        max_position_embeddings=512,
        **SWITCHES[case.family],
    )
    config = PRMConfig(backbone, redundancy=case.redundancy)
    encoding = EncodingConfig(max_length=400, system_prompt='Be "exact"\\, be quick.')
    described = model_card.ExportedPRM(
        name="prm",
        format=case.format,
        dtype=case.dtype,
        encoding=encoding,
        marker_id=marker_id(tiny_tokenizer, encoding.marker),
        model_type=case.family,
        redundancy=case.redundancy,
    )
    card = model_card.render(described, training_record.Training(1))
    root = tmp_path_factory.mktemp("served")
    params = random_params(config)
    loading.export(root / "prm", params, config, tiny_tokenizer, encoding, format=case.format, dtype=case.dtype)
    prm = cfprm_jax.load(root / "prm", "float32")
    tolerance = FLOAT32_TOLERANCE
    if case.dtype == "bfloat16":
        rounded = cfprm_jax.load(root / "prm", "bfloat16")
        tolerance = 2 * max(np.abs(np.subtract(rounded.score(*one), prm.score(*one))).max() for one in SOLUTIONS)
    (command,) = blocks(card, "bash")
    vllm, *arguments = shlex.split(command)
    assert vllm == "vllm" and f'"pooling_type": "{"ALL" if case.format == "reward_model" else "STEP"}"' in command
    arguments[-1] = arguments[-1].replace("STEP", case.pooling)
    with vllm_server.serving(arguments, root) as port:
        yield Served(case, root / "prm", port, card, prm, tolerance)


def test_the_code_of_the_card_gives_the_scores(served, monkeypatch) -> None:
    pytest.importorskip("requests")
    monkeypatch.chdir(served.directory.parent)
    first, *_, last = blocks(served.card, "python")
    space: dict[str, Any] = {}
    exec(first, space)
    exec(last.replace("localhost:8000", f"127.0.0.1:{served.port}"), space)
    expected = {"scores": served.prm.score(QUESTION, STEPS)}
    if served.case.redundancy:
        expected["redundancy"] = served.prm.redundancy(QUESTION, STEPS)
    for name, values in expected.items():
        np.testing.assert_allclose(space[name], values, atol=served.tolerance, rtol=0)


def test_many_solutions_at_once(served) -> None:
    """As token ids, which vLLM batches; every number of the answer."""
    case = served.case
    loaded = open_prm(served.directory, "float32")
    encoded = [Encoder(loaded.tokenizer, loaded.encoding).encode(*solution) for solution in SOLUTIONS]
    body = {"model": "prm", "task": "token_classify", "input": [one.tokens.tolist() for one in encoded]}
    logits = case.format == "reward_model" or case.redundancy
    answers = served.post("/pooling", body | ({"use_activation": False} if logits else {}))["data"]
    expected = [np.asarray(served.prm.score(*solution)) for solution in SOLUTIONS]
    assert np.concatenate(expected).std() > max(0.03, 2 * served.tolerance)  # answers in another order would be found
    worst = 0.0
    for answer, solution, one, scores in zip(answers, SOLUTIONS, encoded, expected, strict=True):
        labels = np.asarray(answer["data"])
        assert len(labels) == len(one.tokens if case.pooling == "ALL" else scores)
        if case.pooling == "ALL":
            labels = labels[one.step_positions]
        if case.redundancy:
            found = sigmoid(np.stack([labels[:, 1] - labels[:, 0], labels[:, 2]], axis=1))
            wanted = np.stack([scores, served.prm.redundancy(*solution)], axis=1)
        elif logits:
            found, wanted = sigmoid(labels), scores[:, None]
        else:
            found, wanted = labels, np.stack([1 - scores, scores], axis=1)
        assert found.shape == wanted.shape
        worst = max(worst, np.abs(found - wanted).max())
    print(f"{case}: largest difference {worst:.2g} of at most {served.tolerance:.2g}")
    assert worst <= served.tolerance


def test_serve_answers_the_same_requests_alike(served, serve) -> None:
    if served.case not in (Case("qwen2", "process_reward_model"), Case("llama", "token_classification")):
        pytest.skip("two of the exports")
    loaded = open_prm(served.directory, "float32")
    scorer = PrefixScorer(loaded, 1 << 12, batch_tokens=1024)
    service = Service("prm", loaded, scorer, policy=BatchPolicy(512, 0.002))
    marker = loaded.encoding.marker
    texts = [question + "".join(f"{step}{marker}" for step in steps) for question, steps in SOLUTIONS]
    ids = [loaded.tokenizer(text, add_special_tokens=True).input_ids for text in texts]
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "".join(f"{step}{marker}" for step in STEPS)},
    ]
    task = {"model": "prm", "task": "token_classify"}
    requests = [
        task | {"input": texts[0]},
        task | {"input": texts},
        task | {"input": ids[3]},
        task | {"input": ids},
        task | {"input": texts[2], "use_activation": False},
        task | {"input": ids[4], "truncate_prompt_tokens": 30},
        task | {"input": ids[4], "truncate_prompt_tokens": 30, "truncation_side": "left"},
        task | {"messages": turns, "add_generation_prompt": False},
    ]
    with serve(service) as client:
        for body in requests:
            theirs, ours = served.post("/pooling", body), client.post("/pooling", body)
            assert ours.status == 200, ours.body
            assert ours.body.keys() == theirs.keys()
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert ours.body["usage"][name] == theirs["usage"][name]
            for one, two in zip(ours.body["data"], theirs["data"], strict=True):
                assert one.keys() == two.keys() and (one["index"], one["object"]) == (two["index"], two["object"])
                np.testing.assert_allclose(one["data"], two["data"], atol=1e-5, rtol=1e-5)
