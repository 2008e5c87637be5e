"""Requests to a judge, its verdicts, and the rows on which it agrees."""

from __future__ import annotations

import json

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.labelling import judge

X = None
ROWS = [
    {"source": "s/1", "candidate": number, "prompt": "What?", "completions": ["a", "b", "c"], "labels": labels}
    for number, labels in enumerate(([1, 0, X], [1, 1, 1], [0, X, X], [1, 0.0, X], [1, 1, 0], [1, X, 1], [1, 1, 1]))
]


def result(number, content):
    body = {"choices": [{"message": {"content": content}}]}
    return {"custom_id": f"s/1/{number}", "response": {"body": body}}


def written(tmp_path, rows):
    path = tmp_path / "judge.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def test_a_request_numbers_the_steps() -> None:
    made = judge.request(ROWS[0], "m", 100)
    assert (made["custom_id"], made["url"], made["body"]["model"]) == ("s/1/0", "/v1/chat/completions", "m")
    content = made["body"]["messages"][0]["content"]
    assert "What?" in content and r"\boxed{-1}" in content
    assert "<paragraph_0>\na\n</paragraph_0>\n\n<paragraph_1>\nb\n</paragraph_1>" in content


def test_consensus_by_hand(tmp_path) -> None:
    replies = [
        result(0, r"Not \boxed{2}; it is \boxed{1}."),  # agrees
        result(1, r"\boxed{-1}"),  # agrees
        result(2, r"\boxed{ 1 }"),  # differs
        result(3, r"\boxed{-1}"),  # differs
        result(4, r"\boxed{7}"),  # beyond the last step
        result(5, "No idea."),
    ]
    verdicts = judge.read_verdicts(written(tmp_path, replies))
    agreement = judge.Consensus()
    assert [row["candidate"] for row in agreement.filter(ROWS, verdicts)] == [0, 1]
    report = agreement.report()
    assert (report["judged"], report["kept"], report["share_kept"]) == (4, 2, 0.5)
    assert report["without_verdict"] == {
        "a number beyond the last step": 1, "no number in the reply": 1, "no verdict": 1,
    }  # fmt: skip
    assert [(e["counts"], e["judge"], e["rows"]) for e in report["confusion"]] == [
        (-1, -1, 1), (0, 1, 1), (1, -1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_replies_that_were_cut_and_numbers_of_thousands_of_digits(tmp_path) -> None:
    """A number in the middle of a reply is no verdict; a judge that repeats itself writes digits up to its limit."""
    cut = result(1, r"Is it \boxed{1}? Let me check")
    cut["response"]["body"]["choices"][0]["finish_reason"] = "length"
    whole = result(2, r"\boxed{1}")
    whole["response"]["body"]["choices"][0]["finish_reason"] = "stop"
    replies = [result(0, r"\boxed{" + "1" * 5000 + "}"), cut, whole, result(3, r"\boxed{-" + "1" * 5000 + "}")]
    agreement = judge.Consensus()
    list(agreement.filter(ROWS[:4], judge.read_verdicts(written(tmp_path, replies))))
    assert agreement.report()["without_verdict"] == {
        "a number beyond the last step": 1, "a reply that was cut": 1, "no number in the reply": 1,
    }  # fmt: skip


def test_steps_without_a_label_are_no_errors(tmp_path) -> None:
    """-100 is unlabelled, as null is and in every other reader."""
    rows = [{**ROWS[0], "labels": labels} for labels in ([1, -100, -100], [True, -100, False], [float("nan"), 0.25, 1])]
    for row in rows:
        judge.check(row)
    assert [judge.first_error(row) for row in rows] == [None, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 1}, "field 'prompt': expected a string"),
        ({"completions": ["a", None, "c"]}, "field 'completions': entry 2: expected a string"),
        ({"completions": [], "labels": []}, "field 'completions': empty"),
        ({"labels": "101"}, "field 'labels': expected a list"),
        ({"labels": [1, 0]}, "field 'labels': 2 entries, and 3 steps"),
        ({"labels": [1, "0", 1]}, "label '0' is not a number"),
        ({"labels": [1, [0], 1]}, r"label \[0\] is not a number"),
        ({"labels": [1, 2, 1]}, r"label 2 is not in \[0, 1\]"),
        ({"labels": [1, -1, 1]}, r"label -1 is not in \[0, 1\]"),
    ],
)
def test_rows_that_are_not_labelled(change, message) -> None:
    with pytest.raises(UserError, match=message):
        judge.check({**ROWS[0], **change})


def test_verdicts_as_plain_rows(tmp_path) -> None:
    rows = [{"id": 1, "candidate": 2, "dataset": "s", "first_error": 0}, {"id": "t", "first_error": -1}]
    assert judge.read_verdicts(written(tmp_path, rows)) == {"s/1/2": 0, "t/0": None}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 1, "first_error": "two"}, "\"first_error\" is 'two', expected the index of a step, -1 or null"),
        ({"id": 1}, 'expected the result of a request ("custom_id", "response")'),
        ({"custom_id": 3, "response": {}}, 'expected the result of a request ("custom_id", "response")'),
    ],
)
def test_bad_verdicts_name_the_line(tmp_path, row, message) -> None:
    with pytest.raises(UserError, match=r"judge\.jsonl:1: ") as error:
        judge.read_verdicts(written(tmp_path, [row]))
    assert message in str(error.value)
    double = [{"id": 1, "first_error": 0}] * 2
    with pytest.raises(UserError, match=r"judge\.jsonl:2: a second verdict of '1/0'"):
        judge.read_verdicts(written(tmp_path, double))
