"""Choosing among candidates: against enumeration, random draws and bon's own rules."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from cfprm_jax.data.steps import SplitCounts
from cfprm_jax.errors import UserError
from cfprm_jax.experiments.cell import digest, every_n, first_n, read_test


def test_every_subset_by_enumeration():
    rng = np.random.default_rng(0)
    rank = rng.integers(0, 4, (5, 7)).astype(float)  # with ties
    correct = rng.random((5, 7)) < 0.5
    found = every_n(rank, correct, (1, 3, 7))
    for q, (line, right) in enumerate(zip(rank, correct, strict=True)):
        for column, n in enumerate((1, 3, 7)):
            subsets = [list(s) for s in itertools.combinations(range(7), n)]
            share = np.mean([right[s[int(np.argmax(line[s]))]] for s in subsets])
            assert found[q, column] == pytest.approx(share)
    assert found[:, 2].tolist() == first_n(rank, correct, (7,))[:, 0].tolist()


def test_the_first_n():
    rank = np.array([[0.5, 0.5, 0.9, -np.inf], [-np.inf, -np.inf, 0.0, 1.0]])
    correct = np.array([[True, False, False, False], [True, False, False, True]])
    assert first_n(rank, correct, (1, 2, 3, 4)).tolist() == [[1, 1, 0, 0], [1, 1, 0, 1]]


@pytest.fixture
def encoder():
    from cfprm_jax.config import EncodingConfig
    from cfprm_jax.data.encoding import Encoder
    from cfprm_jax.synthetic.tokenizer import make_tokenizer

    return Encoder(make_tokenizer(), EncodingConfig())


def write(path, candidates):
    path.write_text(json.dumps({"id": 1, "question": "q", "answer": "one", "candidates": candidates}) + "\n")
    return path


def test_a_test_set_is_read(tmp_path, encoder):
    answers = ["two", "one", "two", None, "one", "one"]
    path = write(
        tmp_path / "test.jsonl",
        [{"text": f"so\n\nanswer={a}", "predicted": a, "correct": a == "one"} for a in answers],
    )
    assert read_test("short", path, encoder, 5).split == SplitCounts(texts=5)
    test = read_test("short", path, encoder, 5)
    assert test.items == [("q", ["so", f"answer={a}"]) for a in answers[:5]]
    assert test.correct.tolist() == [[False, True, False, False, True]]
    assert [test.majority(n).tolist() for n in (1, 2, 3, 5)] == [[False], [False], [False], [False]]
    assert read_test("short", path, encoder, 6).majority(6).tolist() == [True]


def test_a_test_set_that_is_none(tmp_path, encoder):
    with pytest.raises(UserError, match="1 candidates, but --n=2 needs as many"):
        read_test("x", write(tmp_path / "a.jsonl", [{"text": "so", "correct": True}]), encoder, 2)
    with pytest.raises(UserError, match="correct"):
        read_test("x", write(tmp_path / "b.jsonl", [{"text": "so"}]), encoder, 1)


def test_the_digest_depends_on_every_bit():
    params = {"a": {"b": np.zeros(3, np.float32)}, "c": np.ones(2, np.float32)}
    same = {"c": np.ones(2, np.float32), "a": {"b": np.zeros(3, np.float32)}}
    assert digest(params) == digest(same)
    assert digest(params) != digest({**params, "c": np.nextafter(params["c"], np.float32(2))})
