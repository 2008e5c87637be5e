"""Test sets as published."""

from __future__ import annotations

import gzip
import json

import pytest

from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.errors import UserError

MATH = {
    "problem": "1+1?",
    "solution": "2",
    "answer": "2",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/a/1.json",
}
PLUS = {"question": "how many?", "solution": "#### 3", "answer": "None", "perturbation_type": "critical thinking"}
GSM8K = {"question": "how much?", "answer": "He has 2 + 1 = 3.\n#### 3,000"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_published_form(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", [row]) for name, row in (("m", MATH), ("p", PLUS), ("g", GSM8K))]
    math, plus, gsm8k = read_question_files(paths)
    assert (math.id, math.question, math.answer, math.dataset) == ("test/a/1.json", "1+1?", "2", "math500")
    assert math.rest == {"solution": "2", "subject": "Algebra", "level": 1}
    assert (plus.id, plus.answer, plus.dataset) == ("p/1", "None", "gsm_plus")
    assert plus.rest == {"solution": "#### 3", "perturbation_type": "critical thinking"}
    assert (gsm8k.id, gsm8k.answer, gsm8k.dataset) == ("g/1", "3,000", "gsm8k")
    assert gsm8k.rest == {"solution": GSM8K["answer"]}
    assert len({question.name for question in (math, plus, gsm8k)}) == 3


def test_what_a_search_wrote_about_its_candidates_is_no_field_of_the_question(tmp_path):
    row = {"id": 1, "question": "1+1?", "answer": "2", "candidates": [], "cost": {"calls": 3}, "note": "kept"}
    (found,) = read_question_files([write(tmp_path / "found.jsonl", [row])])
    assert found.rest == {"note": "kept"}


def test_ones_own_rows(tmp_path):
    path = tmp_path / "own.json.gz"
    rows = [{"id": 7, "question": "q", "answer": 4}, {"question": "q", "answer": "5", "dataset": "mine", "more": [1]}]
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    first, second = read_question_files(path)
    assert (first.id, first.answer, first.dataset, first.rest) == (7, "4", None, {})
    assert (second.id, second.dataset, second.rest) == ("own/2", "mine", {"more": [1]})


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([GSM8K, {**GSM8K, "question": "?"}]), tmp_path / "t.parquet")
    assert [q.answer for q in read_question_files(tmp_path / "t.parquet")] == ["3,000", "3,000"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "1"}, '"problem" is not a text with a question'),
        ({"question": " ", "answer": "1"}, '"question" is not a text with a question'),
        ({"question": "q"}, '"answer" is not a text or a number'),
        ({"question": "q", "answer": True}, '"answer" is not a text or a number'),
        ({"question": "q", "answer": "1", "id": 1.5}, '"id" is neither'),
        ({"question": "q", "answer": "1", "dataset": 3}, '"dataset" is not a text'),
        ({"question": "q", "answer": "1", "id": "same"}, "was already that of bad.jsonl:1"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", [{"question": "q", "answer": "1", "id": "same"}, row])
    with pytest.raises(UserError, match=r"bad\.jsonl:2: ") as error:
        read_question_files(path)
    assert message in str(error.value)


def test_the_published_files(shared):
    for name, count, dataset in (("math500/test", 500, "math500"), ("gsm8k/test", 1319, "gsm8k")):
        questions = read_question_files(shared / "data" / f"{name}.jsonl")
        assert len(questions) == count and {question.dataset for question in questions} == {dataset}
    plus = read_question_files(shared / "data" / "gsm_plus" / "testmini.jsonl")
    assert len(plus) == 2400 and sum(question.answer == "None" for question in plus) == 300
    assert not any("####" in question.answer for question in [*questions, *plus])
