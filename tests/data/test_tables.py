"""Parquet and Arrow: values that JSON does not have, folders of datasets.save_to_disk, damage."""

from __future__ import annotations

import datetime
import decimal
import json
import pathlib

import pyarrow
import pyarrow.parquet
import pytest

from cfprm_jax import flags, prepare
from cfprm_jax.data import formats
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.formats.files import expand, rows
from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.errors import UserError

WHEN = datetime.datetime(2024, 5, 1, 12, 30)
OTHER = {
    "when": pyarrow.array([WHEN, None]),
    "nanoseconds": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
    "year 300000": pyarrow.array([9_400_000_000_000, 0], pyarrow.timestamp("s")),
    "day": pyarrow.array([WHEN.date(), None]),
    "text as bytes": pyarrow.array(["π".encode(), b"x"]),
    "bytes": pyarrow.array([b"\xff\x00", None]),
    "price": pyarrow.array([decimal.Decimal("12.50"), None]),
    "long": pyarrow.array([decimal.Decimal("0.12345678901234567890123"), None]),
    "whole": pyarrow.array([decimal.Decimal("7"), decimal.Decimal("8")], pyarrow.decimal128(5, 0)),
    "lasted": pyarrow.array([datetime.timedelta(seconds=90), None]),
    "missing": pyarrow.array([float("nan"), 0.5]),
    "inside": pyarrow.array([{"at": [WHEN], "data": b"y"}, None]),
    "kind": pyarrow.array(["a", "b"]).dictionary_encode(),
    "half": pyarrow.array([1.5, None], pyarrow.float16()),
}
PLAIN = [
    {
        "when": "2024-05-01 12:30:00.000000",
        "nanoseconds": "1970-01-01 00:00:00.000000001",
        "day": "2024-05-01",
        "text as bytes": "π",
        "bytes": {"base64": "/wA="},
        "price": 12.5,
        "long": "0.12345678901234567890123",
        "whole": 7,
        "lasted": "0:01:30",
        "missing": None,
        "inside": {"at": ["2024-05-01T12:30:00"], "data": "y"},
        "kind": "a",
        "half": 1.5,
    },
    {"when": None, "text as bytes": "x", "bytes": None, "price": None, "whole": 8, "missing": 0.5, "inside": None},
]


def stepwise(number=2, **more):
    columns = {"prompt": ["q"] * number, "completions": [["a", "b"]] * number, "labels": [[1.0, 0.0]] * number}
    return pyarrow.table({**columns, **more})


def save_to_disk(folder: pathlib.Path, *tables: pyarrow.Table) -> pathlib.Path:
    """As datasets.save_to_disk writes a data set of several shards."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def read(path):
    return [row for file in expand(path) for row in rows(file)]


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
def test_values_that_json_does_not_have(tmp_path, form):
    table, path = pyarrow.table(OTHER), tmp_path / "x"
    if form == "parquet":
        pyarrow.parquet.write_table(table.drop_columns(["half"]), path)
    else:
        make = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table)
    found = [row.data for row in read(path)]
    for data, expected in zip(found, PLAIN, strict=True):
        assert {name: data[name] for name in expected if name in data} == {
            name: value for name, value in expected.items() if name in data
        }
    assert all(isinstance(data["year 300000"], str) for data in found)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("command", ["prepare", "sample", "score"])
def test_other_columns_disturb_no_command(tmp_path, command):
    path = tmp_path / "x.parquet"
    more = {name: OTHER[name] for name in ("when", "bytes", "price")}
    if command == "prepare":
        pyarrow.parquet.write_table(stepwise(**more), path)
        arguments = ["prepare", f"--input={path}", f"--output={tmp_path}/o.jsonl"]
        assert flags.run(prepare.PrepareConfig, prepare.main, arguments) == 0
        return
    columns = {"id": ["a", "b"], "question": ["p", "q"], "answer": ["1", "2"], **more}
    if command == "sample":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        found = [question.rest for question in read_question_files(path)]
    else:
        candidates = pyarrow.array([[{"text": "It is 1."}]] * 2)
        pyarrow.parquet.write_table(pyarrow.table({**columns, "candidates": candidates}), path)
        found = [question.row for question in read_candidates(path)]
    assert found[0]["when"] == PLAIN[0]["when"] and found[0]["price"] == 12.5
    json.dumps(found, allow_nan=False)


def test_the_files_that_were_a_traceback(shared):
    folder = shared / "cases" / "more"
    for name in ("K07_questions_with_a_timestamp.parquet", "K07_questions_with_bytes.parquet"):
        json.dumps([question.rest for question in read_question_files(folder / name)], allow_nan=False)
    found = read_candidates(folder / "K07_candidates_with_a_timestamp.parquet")
    json.dumps([question.row for question in found], allow_nan=False)


def test_a_saved_data_set_is_read_in_the_order_of_its_shards(tmp_path):
    first, second = stepwise(3), stepwise(300).set_column(0, "prompt", [["r"] * 300])
    folder = save_to_disk(tmp_path / "saved", second, first)
    found = list(formats.read(folder))
    assert [t.question for t in found] == ["r"] * 300 + ["q"] * 3
    assert found[0].source == "data-00000-of-00002.arrow:1"
    assert next(formats.read(folder / "data-00001-of-00002.arrow")).labels.tolist() == [1.0, 0.0]


def test_folders_that_are_no_data_set(tmp_path):
    save_to_disk(tmp_path / "all" / "train", stepwise())
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match="holds the splits train: name one"):
        expand(tmp_path / "all")
    with pytest.raises(UserError, match="is a directory; name files"):
        expand(tmp_path)
    folder = save_to_disk(tmp_path / "moved", stepwise())
    for state, message in (
        ({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_files": [{}]}, "Dataset.to_json"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow: no such file"),
        ({"_data_files": [{"filename": "../x"}]}, "not what datasets.save_to_disk writes"),
        ([], "not what datasets.save_to_disk writes"),
    ):
        (folder / "state.json").write_text(json.dumps(state))
        with pytest.raises(UserError, match=message):
            expand(folder)


def test_damage_is_one_line(tmp_path):
    (stream,) = save_to_disk(tmp_path / "saved", stepwise(2000)).glob("*.arrow")
    data = stream.read_bytes()
    pyarrow.parquet.write_table(stepwise(), tmp_path / "x.parquet")
    parquet = (tmp_path / "x.parquet").read_bytes()
    for content in (data[:-8], data[: len(data) // 2], data[:4], parquet[:-5], parquet[:50]):
        (tmp_path / "cut").write_bytes(content)
        with pytest.raises(UserError, match=r"^cut: damaged (Arrow|parquet) file"):
            read(tmp_path / "cut")
    # Two columns of one name are two values of one field.
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    (stream,) = save_to_disk(tmp_path / "twice", twice).glob("*.arrow")
    with pytest.raises(UserError, match="two columns are called 'a'"):
        read(stream)
