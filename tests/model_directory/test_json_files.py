"""JSON files: what is refused before it costs time, memory or a traceback."""

from __future__ import annotations

import os

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.model_directory import json_files
from cfprm_jax.model_directory.json_files import read_object


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not readable as JSON: Expecting"),
        ('{"a": [1\n\n', r"not readable as JSON: Expecting ',' delimiter: line 1 column 9 \(char 8\)"),
        ("[" * 100_000, "not readable as JSON: nested more than 64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "not readable as JSON: nested more than 64 deep"),
        ('{"a": ' + "9" * 5000 + "}", "not readable as JSON: Exceeds the limit"),
        ('{"a": 1, "a": 2}', "an object has 'a' twice"),
        ('{"a": "\\ud800"}', "not Unicode: surrogates not allowed"),
        (b'{"a": "\xff"}', "not UTF-8: invalid start byte at byte 7"),
        ("null", "expected a JSON object, found null"),
        ("[]", "expected a JSON object, found a list"),
        ("3", "expected a JSON object, found a number"),
        ('"x"', "expected a JSON object, found a text"),
        ("true", "expected a JSON object, found true or false"),
    ],
)
def test_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message) as error:
        read_object(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"config.json: no such file"):
        read_object(path)
    path.mkdir()
    with pytest.raises(UserError, match=r"expected a regular file, found a directory"):
        read_object(path)
    os.mkfifo(tmp_path / "pipe")  # without a writer: reading it would never end
    with pytest.raises(UserError, match=r"expected a regular file, found a pipe"):
        read_object(tmp_path / "pipe")
    (tmp_path / "large").write_text("{}" + " " * 100)
    with pytest.raises(UserError, match=r"large: 102 bytes, expected at most 50"):
        read_object(tmp_path / "large", 50)


def test_what_may_be_there(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 64 + '"\\ud83d\\ude00 \\\\ud"' + "}" * 64)
    value = read_object(path)
    for _ in range(64):
        value = value["a"]
    assert value == "😀 \\ud"
    path.write_text('{"a": 1, "a": 2}')
    assert json_files.read_object(path, repeats=True) == {"a": 2}
