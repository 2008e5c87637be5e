"""What clients of vLLM, verl, OpenR and search-and-learn send, and what they read of the answer."""

from __future__ import annotations

import numpy as np
import pytest

from cfprm_jax.inference.load import PRM
from cfprm_jax.inference.rows import sigmoid
from cfprm_jax.inference.scorer import Scorer


def near(found, wanted) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def near_logits(found, wanted) -> None:
    """Logits of other batches: a logit is a sum that may cancel, so the bound is absolute."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def marked(prm, question, steps) -> str:
    """The text of a conversation, with a marker after each step."""
    prompt = prm.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return prompt + "".join(f"{step}<extra_0>" for step in steps)


def test_steps_of_one_solution_and_of_many(client, solutions, expected) -> None:
    question, steps = solutions[0]
    answer = client.post("/v1/steps", {"question": question, "steps": steps})
    assert answer.status == 200
    near(answer.body["scores"], sigmoid(expected[0]))
    several = [s for q, s in solutions if q == question]
    answer = client.post("/v1/steps", {"question": question, "solutions": several, "logits": True, "model": "tiny"})
    assert answer.status == 200 and len(answer.body["scores"]) == len(several) == 8
    for found, logits, z in zip(answer.body["scores"], answer.body["logits"], expected, strict=False):
        near(found, sigmoid(z))
        near_logits(logits, z)
    assert answer.body["usage"]["total_tokens"] > 0


def test_pooling_as_vllm_answers(client, prm, solutions, expected) -> None:
    """A score for every marker, of texts, of ids and of a conversation."""
    texts = [marked(prm, *solution) for solution in solutions[:2]]
    answer = client.post("/pooling", {"model": "tiny", "input": texts, "task": "token_classify"})
    assert answer.status == 200 and answer.body["object"] == "list" and answer.body["model"] == "tiny"
    for i, entry in enumerate(answer.body["data"]):
        assert (entry["index"], entry["object"]) == (i, "pooling")
        near(entry["data"], np.stack([1 - sigmoid(expected[i]), sigmoid(expected[i])], axis=1))
    ids = [prm.tokenizer(text, add_special_tokens=True).input_ids for text in texts]
    usage = answer.body["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == sum(map(len, ids))
    for given in (ids, ids[0], texts[0]):
        again = client.post("/pooling", {"input": given}).body["data"]
        near(again[0]["data"], answer.body["data"][0]["data"])
    logits = client.post("/pooling", {"input": ids[0], "use_activation": False}).body["data"][0]["data"]
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    near(softmax, answer.body["data"][0]["data"])


def test_pooling_of_a_conversation(client, prm, solutions) -> None:
    question, steps = solutions[0]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "".join(f"{step}<extra_0>" for step in steps)},
    ]
    text = prm.tokenizer.apply_chat_template(messages, tokenize=False)
    found = client.post("/pooling", {"model": "tiny", "messages": messages}).body["data"][0]["data"]
    ids = prm.tokenizer(text, add_special_tokens=False).input_ids
    near(found, client.post("/pooling", {"input": ids}).body["data"][0]["data"])
    assert len(found) == len(steps)


def test_truncation_keeps_the_beginning_or_the_end(client, prm, solutions) -> None:
    """The beginning by default, as in vLLM for pooling."""
    ids = prm.tokenizer(marked(prm, *solutions[0])).input_ids
    length = len(ids) - 3
    cut = client.post("/pooling", {"input": ids, "truncate_prompt_tokens": length}).body
    assert cut["usage"]["prompt_tokens"] == length
    near(cut["data"][0]["data"], client.post("/pooling", {"input": ids[:length]}).body["data"][0]["data"])
    cut = client.post("/pooling", {"input": ids, "truncate_prompt_tokens": 12, "truncation_side": "left"}).body
    assert cut["usage"]["prompt_tokens"] == 12
    near(cut["data"][0]["data"], client.post("/pooling", {"input": ids[-12:]}).body["data"][0]["data"])
    assert (
        client.post("/pooling", {"input": ids * 4, "truncate_prompt_tokens": -1}).body["usage"]["prompt_tokens"] == 96
    )


def test_verl_reads_the_last_probability(client, prm, solutions, expected) -> None:
    """verl's reward loop: {"model", "input", "activation": false}, then data[-1]["probs"][-1]."""
    for i in range(3):
        body = {"model": "tiny", "input": marked(prm, *solutions[i]), "activation": False}
        answer = client.post("/classify", body)
        assert answer.status == 200
        near_logits(answer.body["data"][-1]["probs"][-1], expected[i][-1])
        assert answer.body["data"][0]["label"] == f"LABEL_{int(expected[i][-1] > 0)}"
        body["activation"] = True
        near(client.post("/classify", body).body["data"][-1]["probs"][-1], sigmoid(expected[i])[-1])


def test_openr_finds_the_worker_and_asks_it(client, prm, solutions, expected) -> None:
    """OpenR, compute-optimal-tts: the controller's address, then values with a FastChat header."""
    address = client.post("/get_worker_address", {"model": "tiny"}).body["address"]
    assert address == f"http://127.0.0.1:{client.port}"
    assert client.post("/get_worker_address", {"model": "another"}).body["address"] == ""
    texts = [marked(prm, *solution) for solution in solutions[:3]]
    header = {"User-Agent": "FastChat Client"}
    values = client.post("/worker_value_inference", {"input_str": texts}, **header).body["value"]
    for found, z in zip(values, expected, strict=False):
        near(found, sigmoid(z))
    near(client.post("/worker_value_inference", {"input_str": texts[1]}, **header).body["value"], values[1])


def test_search_and_learn_scores_a_list_of_lists(prm, solutions, expected) -> None:
    """PRM.score of search-and-learn: questions, and for each the texts of its candidates."""
    found = PRM(Scorer(prm, batch_rows=1)).score_many(
        [solutions[0][0], solutions[8][0]],
        [["\n\n".join(steps) for _, steps in solutions[:2]], [solutions[8][1]]],
    )
    assert [len(scores) for scores in found] == [2, 1]
    for scores, z in zip((*found[0], *found[1]), (expected[0], expected[1], expected[8]), strict=True):
        near(scores, sigmoid(z))


def test_a_text_of_several_lines_that_is_one_step_warns(prm, solutions) -> None:
    question, steps = solutions[0]
    with pytest.warns(UserWarning, match=r'1 of 2 texts are one step .* separator is "\\n\\n"'):
        ((lines, single),) = PRM(Scorer(prm, batch_rows=1)).score_many([question], [["\n".join(steps), steps[0]]])
    assert len(lines) == len(single) == 1


def test_models_health_and_metrics(client, solutions) -> None:
    models = client.get("/v1/models").body
    assert models["object"] == "list" and models["data"][0]["id"] == "tiny" and models["data"][0]["max_model_len"] == 96
    assert client.get("/health").body == {"status": "ok"}
    client.post("/v1/steps", {"question": solutions[0][0], "steps": solutions[0][1]})
    text = client.get("/metrics").body
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['cfprm_requests_total{route="/v1/steps",status="200"}']) >= 1
    assert (
        float(values['cfprm_tokens_total{kind="requested"}'])
        >= float(values['cfprm_tokens_total{kind="computed"}'])
        > 0
    )
    assert values["cfprm_healthy"] == "1.0" and values["cfprm_waiting_requests"] == "0.0"


@pytest.mark.parametrize("repeat", range(2))
def test_one_more_step_costs_one_step(client, prm, solutions, repeat) -> None:
    """The question differs a repeat, so that nothing of it is cached."""
    _, steps = solutions[0]
    question = solutions[0][0] + "+one" * (2 + repeat)
    scorer = client.service.scorer
    client.post("/v1/steps", {"question": question, "steps": steps[:-1]})
    before = scorer.counts.computed
    assert client.post("/v1/steps", {"question": question, "steps": steps}).status == 200
    tokens = len(prm.tokenizer(steps[-1], add_special_tokens=False).input_ids) + 1
    assert scorer.counts.computed - before == tokens
