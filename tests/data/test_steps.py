"""Texts cut into steps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data.steps import SplitCounts, is_unsplit, split_steps


@pytest.mark.parametrize(
    "text",
    [
        "a\n\nb",
        "a\n   \nb",
        "a\n\t\nb",
        "a\r\n\r\nb",
        "a\r\n  \r\nb",
        "a\r\rb",
        "a\n\n\nb",
        "a\n \n\u00a0\n\n\nb",
        "\n\na\n\nb\n \n",
    ],
)
def test_blank_lines_of_any_kind_are_one_separator(text):
    assert split_steps(text, "\n\n") == ["a", "b"]


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a \n b", "a\rb", "a\x0b\x0cb", "a  b"])
def test_what_is_no_blank_line_separates_nothing(text):
    assert split_steps(text, "\n\n") == [text]


def test_other_separators():
    assert split_steps("a\nb\r\n\nc", "\n") == ["a", "b", "c"]
    assert split_steps("a\n\nb\n\n\nc", "\n\n\n") == ["a\n\nb", "c"]
    assert split_steps("a ки\nb ки", " ки") == ["a", "\nb"]
    assert split_steps("a;\n\n;b", ";") == ["a", "b"]
    assert split_steps(" \n \n", "\n\n") == []


@given(st.lists(st.text(alphabet="ab .\n", min_size=1), max_size=6))
def test_plain_text_is_cut_as_by_blank_lines(pieces):
    text = "\n\n".join(pieces)
    found = split_steps(text, "\n\n")
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(piece.strip() and "\n\n" not in piece for piece in found)


@pytest.mark.parametrize(
    ("text", "separator", "unsplit"),
    [
        ("a\nb", "\n\n", True),
        ("a\r\nb", "\n\n", True),
        ("a\n\nb", " ки", True),
        ("a\n\nb\nc", "\n\n", False),
        ("\n a \n", "\n\n", False),
        ("a\nb", "\n", False),
        (" \n ", "\n\n", False),
    ],
)
def test_texts_of_several_lines_and_one_step(text, separator, unsplit):
    assert is_unsplit(text, split_steps(text, separator)) == unsplit


def test_counts_of_texts_and_their_warning():
    counts = SplitCounts()
    for text in ("a\nb", "a\n\nb", "a"):
        counts.add(text, split_steps(text, "\n\n"))
    assert counts == SplitCounts(texts=3, unsplit=1)
    line = counts.warning("\n\n")
    assert "1 of 3 texts are one step" in line and '"\\n\\n"' in line and "\n" not in line
    assert SplitCounts(texts=3).warning("\n\n") is None


def test_the_case_of_a_blank_line_with_spaces(shared):
    row = json.loads((shared / "cases" / "more" / "K08_blank_line_with_spaces.jsonl").read_text().splitlines()[0])
    assert split_steps(row["candidates"][0]["text"], "\n\n") == ["1+1=2.", "So 2."]
