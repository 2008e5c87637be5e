"""Rows out of files: every wrapping gives the same rows, every kind of damage its message."""

from __future__ import annotations

import builtins
import gzip
import json
import lzma
import os
import pathlib
import socket

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.data.formats.files import InputFile, Row, expand, rows
from cfprm_jax.errors import UserError

ROWS = [{"a": "x\ny", "n": [1, None, 0.25]}, {"a": "кипяток ✓", "n": []}, {"a": "]}{[,", "n": [True]}]


def read(path: pathlib.Path) -> list[Row]:
    (file,) = expand(path)
    return list(rows(file))


def written(path: pathlib.Path, form: str) -> pathlib.Path:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    text = {
        "lines": lines,
        "lines without a last newline": lines.rstrip("\n"),
        "lines with blank ones": lines.replace("\n", "\n\n"),
        "lines with carriage returns": lines.replace("\n", "\r\n"),
        "lines after a byte order mark": "\ufeff" + lines,
        "array": json.dumps(ROWS),
        "pretty array": json.dumps(ROWS, indent=2, ensure_ascii=False),
        "spaced array": "\n \n[ " + " ,\n ".join(map(json.dumps, ROWS)) + " ]\n\n",
    }[form]
    path.write_bytes(text.encode("utf-8"))
    return path


FORMS = [
    "lines",
    "lines without a last newline",
    "lines with blank ones",
    "lines with carriage returns",
    "lines after a byte order mark",
    "array",
    "pretty array",
    "spaced array",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", ["plain", "gzip"])
def test_every_form_gives_the_same_rows(tmp_path: pathlib.Path, form: str, packed: str) -> None:
    # A file's kind is detected from its content, not its name.
    path = written(tmp_path / "corpus.dat", form)
    if packed == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    found = read(path)
    assert [row.data for row in found] == ROWS
    assert 0.9 < found[-1].fraction <= 1.0


def test_parquet(tmp_path: pathlib.Path) -> None:
    table = pyarrow.Table.from_pylist([{"a": str(number), "n": [0.5, None]} for number in range(600)])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=250)
    found = read(tmp_path / "x.parquet")
    assert [row.data for row in found] == table.to_pylist()
    assert [row.line for row in found] == list(range(1, 601))
    assert found[-1].fraction == 1.0


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n\n{"a": 2}\n')
    assert [row.line for row in read(tmp_path / "lines")] == [1, 3]
    (tmp_path / "array").write_text('\n[\n {"a":\n 1},\n\n {"a": 2}\n]')
    assert [row.line for row in read(tmp_path / "array")] == [3, 6]


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=40)), min_size=1, max_size=6), st.integers(1, 9))
def test_an_array_is_the_same_for_every_buffer_size(tmp_path_factory, elements: list[dict], chunk: int) -> None:
    import cfprm_jax.data.formats.files as module

    path = tmp_path_factory.mktemp("array") / "a.json"
    path.write_text(json.dumps(elements, ensure_ascii=False, indent=chunk % 3 or None), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        assert [row.data for row in read(path)] == elements


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": 1}\nnonsense\n', "not JSON: Expecting value at column 1"),
        (b'{"a": 1}\n{"a": \n', "not JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "not UTF-8: invalid start byte at byte 8"),
        (b'{"a": 1}\n[1, 2]\n', "expected a JSON object, found an array"),
        (b'{"a": 1}\n"text"\n', "expected a JSON object, found a string"),
        (b'{"a": 1}\n17\n', "expected a JSON object, found a number"),
        (b'{"a": 1}\n{"a": "\\ud800"}\n', "not Unicode: surrogates not allowed"),
        (b'{"a": 1}\n' + b'{"a":' * 100_000 + b"\n", "not JSON"),
        (b'{"a": 1}\n{"a": ' + b"9" * 5000 + b"}\n", "not JSON that can be read"),
    ],
)
def test_an_unreadable_line_is_a_row_with_a_reason(tmp_path: pathlib.Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content + b'{"a": 3}\n')
    first, bad, last = read(tmp_path / "x")
    assert (first.data, last.data) == ({"a": 1}, {"a": 3})
    assert bad.data is None
    assert bad.line == 2
    assert reason in bad.reason
    assert len(bad.excerpt) <= 200


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize(
    ("line", "message", "column"),
    [
        ('{"prompt": "What is 2 + 3?", "completions": ["5"], "labels": [1', "Expecting ',' delimiter", 64),
        ('{"prompt": "Was ist groß? ½ ∑", "labels": [1', "Expecting ',' delimiter", 45),
        ('{"a": ', "Expecting value", 7),
        ('{"a": 1', "Expecting ',' delimiter", 8),
        ('{"a": "x', "Unterminated string starting at", 7),
        ('{"a" 2}', "Expecting ':' delimiter", 6),
        ('{"a": 1} {"b": 2}', "Extra data", 10),
    ],
)
def test_the_column_of_an_error_is_that_of_the_line(
    tmp_path: pathlib.Path, line: str, message: str, column: int, end: str
) -> None:
    (tmp_path / "x").write_bytes(f'{{"a": 1}}\n{line}{end}'.encode())
    _, bad = read(tmp_path / "x")
    assert (bad.line, bad.reason) == (2, f"not JSON: {message} at column {column}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x: empty file"),
        (b"\n \n", "x: empty file"),
        (b"[]", "x: empty file: an array without rows"),
        (gzip.compress(b"", mtime=0), "x: empty file"),
        (gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20], "x: damaged gzip file"),
        (b"\x1f\x8b rubbish", "x: damaged gzip file"),
        (b"PAR1 rubbish", "x: damaged parquet file"),
        (b'[{"a": 1},\n{"a" 2}]', "x:2: not JSON: Expecting ':' delimiter"),
        (b'[{"a": 1},\n{"a": [1\n\n', "x:2: not JSON: Expecting ',' delimiter"),
        (b'[{"a": 1}\n{"a": 2}]', "x:2: not JSON: expected ',', found '{'"),
        (b'[{"a": 1},\n\n', "x:3: not JSON: the array does not end"),
        (b'[{"a": 1},\n]', "x:2: not JSON"),
        (b'[{"a": 1}]\n\n ,', "x:3: not JSON: text after the end of the array"),
        (b'[{"a": 1}]\n{"a": 2}', "x:2: not JSON: text after the end of the array"),
        (b'[{"a": "\xff"}]', "x: not UTF-8"),
    ],
)
def test_damage_after_which_no_row_can_be_read(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError) as error:
        read(tmp_path / "x")
    assert message in str(error.value)


def test_parquet_without_pyarrow_is_an_error_with_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "x.parquet")
    original = builtins.__import__

    def missing(name: str, *arguments, **named):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return original(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"reading parquet needs pyarrow: pip install pyarrow"):
        read(tmp_path / "x.parquet")


def test_paths_and_patterns(tmp_path: pathlib.Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/a.jsonl", "odd[1].jsonl", "other.txt"):
        (tmp_path / name).write_text("{}")

    def names(paths) -> list[str]:
        return [file.name for file in expand(paths)]

    assert names(tmp_path / "b.jsonl") == ["b.jsonl"]
    assert names([tmp_path / "b.jsonl", str(tmp_path / "*.jsonl")]) == ["b.jsonl", "a.jsonl", "odd[1].jsonl"]
    assert names(str(tmp_path / "odd[1].jsonl")) == ["odd[1].jsonl"]
    # Two files of one name have different names in messages and records.
    assert names(str(tmp_path / "**/a.jsonl")) == [str(tmp_path / "a.jsonl"), str(tmp_path / "deep/a.jsonl")]
    with pytest.raises(UserError, match=r"nothing\*: no such file matches"):
        expand(str(tmp_path / "nothing*"))
    with pytest.raises(UserError, match=r"gone\.jsonl: no such file"):
        expand(tmp_path / "gone.jsonl")
    with pytest.raises(UserError, match="deep is a directory; name files"):
        expand(tmp_path / "deep")
    with pytest.raises(UserError, match="no input file was named"):
        expand([])


def test_input_file_has_its_size(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_bytes(b"{}\n")
    assert expand(tmp_path / "x") == [InputFile(tmp_path / "x", "x", 3)]


def test_only_files_are_read(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name, kind in (("pipe", "a pipe"), ("socket", "a socket"), ("link", "a pipe"), ("/dev/zero", "a device")):
        with pytest.raises(UserError, match=f"{name} is {kind}; only files are read"):
            expand(tmp_path / name)
    listener.close()
    reader, writer = os.pipe()
    with pytest.raises(UserError, match=f"/dev/fd/{reader} is a pipe"):
        expand(f"/dev/fd/{reader}")
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("before", "line"), [(b'{"a": 1}\n', 2), (b"", 1), (b"[", 1), (b'[{"a": 1},\n', 2)])
def test_a_row_without_an_end_is_named(tmp_path, monkeypatch, before, line, packed) -> None:
    import cfprm_jax.data.formats.files as module

    monkeypatch.setattr(module, "MOST_ROW_BYTES", 1 << 21)
    data = before + b'{"a": "' + b"x" * (1 << 23)
    (tmp_path / "x").write_bytes(gzip.compress(data, 1) if packed else data)
    with pytest.raises(UserError, match=rf"^x:{line}: a row of more than"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' occurs twice in one object"),
        ('{"a": Infinity}', "Infinity is not JSON"),
        ('{"a": [-1e999]}', "a number is beyond the range of float64"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64"),
        ('{"a": ' + '{"b":[' * 33 + "]}" * 33 + "}", "nested deeper than 64"),
        ('{"a": ' + "[" * 900 + "]" * 900 + "}", "not JSON that can be read"),
    ],
)
def test_what_could_not_be_written_again_is_no_row(tmp_path, text, reason) -> None:
    (tmp_path / "x").write_text(text + "\n")
    (row,) = read(tmp_path / "x")
    assert row.data is None and reason in row.reason
    (tmp_path / "x").write_text('{"a": NaN, "b": ' + "[" * 60 + "]" * 60 + ', "c": "x\\u0000"}\n')
    (row,) = read(tmp_path / "x")
    assert row.data is not None and (row.data["a"], row.data["c"]) == (None, "x\0")


def test_other_packings_are_named(tmp_path) -> None:
    for data, name in (
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04xx", "zip archive"),
        (b"BZh9", "bzip2"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (lzma.compress(b"{}"), "xz"),
    ):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(UserError, match=rf"^x: .*{name}.*; expected UTF-8"):
            read(tmp_path / "x")
