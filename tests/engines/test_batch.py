"""Batch files: requests out, completions in, and what is missing in them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from completion_servers import reply

from cfprm_jax.engines.batch import BatchEngine, RequestsWritten
from cfprm_jax.errors import UserError
from cfprm_jax.inference.sampler import Prompt, Sampling

PROMPTS = [Prompt(f"q{number}", np.array([number, 7], np.int32)) for number in range(3)]
SAMPLING = Sampling(max_new_tokens=9)


def answered(requests, path):
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    results = [
        {"custom_id": row["custom_id"], "response": {"status_code": 200, "body": reply(str(row["body"]["seed"]))}}
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in results))
    return path


def test_rounds_of_files(tmp_path) -> None:
    first = BatchEngine("m", SAMPLING, None)
    assert list(first.complete(PROMPTS[:2], 2)) == [] and first.write_missing(tmp_path / "r1.jsonl") == 4
    (row, *_) = map(json.loads, (tmp_path / "r1.jsonl").read_text().splitlines())
    assert (row["method"], row["url"], row["body"]["prompt"]) == ("POST", "/v1/completions", [0, 7])
    assert (row["body"]["top_k"], row["body"]["min_p"], row["body"]["repetition_penalty"]) == (-1, 0.0, 1.0)
    one = answered(tmp_path / "r1.jsonl", tmp_path / "c1.jsonl")
    second = BatchEngine("m", SAMPLING, [str(one)])
    # A third completion of each, and a third prompt: only new ones are requested.
    assert [place for place, _ in second.complete(PROMPTS[:2], 2)] == [0, 1] and not second.missing
    assert list(second.complete(PROMPTS, 3)) == [] and second.write_missing(tmp_path / "r2.jsonl") == 5
    two = answered(tmp_path / "r2.jsonl", tmp_path / "c2.jsonl")
    third = BatchEngine("m", SAMPLING, [str(one), str(two)])
    assert [len(made) for _, made in third.complete(PROMPTS, 3)] == [3, 3, 3]
    assert third.counts.completions == 9


def requested(path, model="m", sampling=SAMPLING, prompts=PROMPTS) -> BatchEngine:
    """An engine that was asked for two completions of each prompt."""
    engine = BatchEngine(model, sampling, [str(path)] if path else None)
    assert all(len(made) == 2 for _, made in engine.complete(prompts, 2))
    return engine


def test_completions_of_other_requests_are_not_taken(tmp_path) -> None:
    """Of another model, prompt (a system prompt changes it), seed, temperature, top_p, top_k or length."""
    requested(None).write_missing(tmp_path / "requests.jsonl")
    given = answered(tmp_path / "requests.jsonl", tmp_path / "completions.jsonl")
    assert not requested(given).missing
    changes = {"seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_new_tokens": 10}
    others = [{"sampling": dataclasses.replace(SAMPLING, **{name: value})} for name, value in changes.items()]
    others += [{"model": "n"}, {"prompts": [prompt._replace(tokens=prompt.tokens + 1) for prompt in PROMPTS]}]
    for other in others:
        engine = requested(given, **other)
        assert len(engine.missing) == engine.of_other_requests == 6
        with pytest.raises(UserError, match="lacks 6 of them; it has 6 of these for other requests: another prompt"):
            raise RequestsWritten(engine, "")
    again = RequestsWritten(engine, str(tmp_path / "again.jsonl"))
    assert "again.jsonl; --completions has 6 of these for other requests" in str(again)
    new = requested(given, prompts=[Prompt("q9", PROMPTS[0].tokens)])
    assert len(new.missing) == 2 and not new.of_other_requests


def test_completions_of_an_earlier_version_are_named(tmp_path) -> None:
    """Whose ids had the prompt's name and the number alone."""
    requested(None).write_missing(tmp_path / "requests.jsonl")
    given = answered(tmp_path / "requests.jsonl", tmp_path / "completions.jsonl")
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    short = [{**row, "custom_id": row["custom_id"].rpartition("-")[0]} for row in rows]
    given.write_text("".join(json.dumps(row) + "\n" for row in short))
    assert requested(given).of_other_requests == 6


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"custom_id": "a"}, "not the result of a request"),
        ({"custom_id": "a", "response": {"status_code": 500, "body": {}}}, "the request failed with status 500"),
        ({"custom_id": "a", "response": {"body": {"choices": "x"}}}, "not a completion: expected one choice"),
        ({"custom_id": "a", "response": None, "error": {"code": "expired"}}, "expired"),
    ],
)
def test_bad_results_name_the_line(tmp_path, row, message) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=r"c\.jsonl:1: ") as error:
        BatchEngine("m", SAMPLING, [str(path)])
    assert message in str(error.value)


def test_two_results_of_one_request(tmp_path) -> None:
    row = json.dumps({"custom_id": "a", "response": {"body": reply("x")}}) + "\n"
    (tmp_path / "c.jsonl").write_text(2 * row)
    with pytest.raises(UserError, match=r"c\.jsonl:2: a second completion of 'a'"):
        BatchEngine("m", SAMPLING, [str(tmp_path / "c.jsonl")])
