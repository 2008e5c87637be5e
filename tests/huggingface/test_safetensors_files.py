"""Headers, chunks and shards against the safetensors library; each kind of damage has its own error."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from cfprm_jax.errors import UserError
from cfprm_jax.huggingface import safetensors_files
from cfprm_jax.huggingface.safetensors_files import PlannedTensor, list_directory, read_header, write_shards


@pytest.fixture
def tensors():
    generator = np.random.default_rng(0)
    return {
        "a": generator.standard_normal((7, 5)).astype(np.float32),
        "b": generator.standard_normal((3, 2, 4)).astype(ml_dtypes.bfloat16),
        "c": generator.standard_normal(11).astype(np.float16),
    }


def test_reads_what_the_library_writes(tensors, tmp_path, monkeypatch):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors_files, "_CHUNK_BYTES", 24)  # several chunks a tensor
    listing = list_directory(tmp_path)
    assert not listing.problems
    assert {t.name for t in listing.tensors} == set(tensors)
    for tensor in listing.tensors:
        np.testing.assert_array_equal(tensor.read(), tensors[tensor.name])
        pieces = [(start, rows.copy()) for start, rows in tensor.chunks(1, 3)]
        assert pieces[0][0] == 1
        np.testing.assert_array_equal(np.concatenate([rows for _, rows in pieces]), tensors[tensor.name][1:3])


def test_one_changed_row_of_a_large_table_is_another_model(tmp_path):
    """The marker's row of an embedding, which users set; in which shard a tensor is does not matter."""
    table = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    norm = np.ones(64, np.float32)

    def identity(name, files):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            safetensors.numpy.save_file(content, tmp_path / name / file)
        if len(files) > 1:
            index = {"weight_map": {key: file for file, content in files.items() for key in content}}
            (tmp_path / name / safetensors_files.INDEX).write_text(json.dumps(index))
        return safetensors_files.fingerprint(list_directory(tmp_path / name).tensors)

    whole = identity("whole", {"model.safetensors": {"table": table, "norm": norm}})
    assert whole == identity("shards", {"1.safetensors": {"norm": norm}, "2.safetensors": {"table": table}})
    table[321] = table[3]
    assert whole != identity("row", {"model.safetensors": {"table": table, "norm": norm}})
    assert whole != identity("name", {"model.safetensors": {"table": table, "other": norm}})


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("limit", [10**9, 200])
def test_writes_what_the_library_reads(dtype, limit, tmp_path):
    generator = np.random.default_rng(1)
    numpy_dtype = safetensors_files.DTYPES[dtype]
    values = {f"t{i}": generator.standard_normal((i + 1, 9)).astype(numpy_dtype) for i in range(6)}
    live = []

    def fetch(name):
        live.append(name)
        yield values[name][:1]
        if len(values[name]) > 1:
            yield values[name][1:]

    planned = [PlannedTensor(name, v.shape, lambda name=name: fetch(name)) for name, v in values.items()]
    sizes = []
    files = write_shards(tmp_path, planned, dtype, limit, sizes.append)
    assert live == list(values)
    pieces = [piece for v in values.values() for piece in (v[:1], v[1:]) if len(piece)]
    assert sizes == [piece.nbytes for piece in pieces]
    assert len(files) == (1 if limit == 10**9 else {"F32": 5, "BF16": 2}[dtype])
    read = {}
    for file in files:
        part = safetensors.numpy.load_file(tmp_path / file)
        assert len(part) == 1 or sum(v.nbytes for v in part.values()) <= limit
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        read |= part
    assert read.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in values.values())
    assert not list_directory(tmp_path).problems


def test_a_fetch_that_breaks_its_plan_is_a_fault(tmp_path):
    with pytest.raises(ValueError, match=r"x: float64 .* planned F32"):
        write_shards(tmp_path, [PlannedTensor("x", (2,), lambda: [np.zeros(2)])], "F32", 100)
    with pytest.raises(ValueError, match=r"x: 1 rows, planned \(2,\)"):
        write_shards(tmp_path, [PlannedTensor("x", (2,), lambda: [np.zeros(1, np.float32)])], "F32", 100)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:5], "truncated: 5 bytes, less than the 8"),
        (lambda data: data[:40], "truncated: 40 bytes, but the header alone ends at byte"),
        (lambda data: data[:-3], r"truncated: \d+ bytes, but its header describes \d+"),
        (lambda data: data + b"xx", r"damaged: \d+ bytes, but its header describes \d+"),
        (lambda data: b"<html>" * 100, "not a safetensors file: its first 8 bytes give a header of"),
        (lambda data: data[:8] + b"{]" + data[10:], "its header: not readable as JSON"),
        (lambda data: data.replace(b"[7,5]", b"[7,4]"), "damaged: a has 140 bytes for shape \\[7, 4\\] of F32"),
    ],
)
def test_damaged_files(damage, message, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)
    listing = list_directory(tmp_path)
    assert listing.unreadable and not listing.tensors and len(listing.problems) == 1


def test_a_file_that_shrinks_while_it_is_read(tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    (last,) = (t for t in read_header(path) if t.name == "c")
    path.write_bytes(path.read_bytes()[: last.offset + 2])
    with pytest.raises(UserError, match="ended while being read"):
        last.read()


@pytest.fixture
def shards(tensors, tmp_path):
    """Two shards with an index, and what writes the index again."""
    safetensors.numpy.save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    safetensors.numpy.save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / "two.safetensors")

    def write(**changes):
        weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors", **changes}
        weight_map = {name: file for name, file in weight_map.items() if file}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    write()
    return write


def test_shards(shards, tmp_path):
    listing = list_directory(tmp_path)
    assert {t.name: t.file.name for t in listing.tensors} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
        "c": "two.safetensors",
    }
    assert not listing.problems


def test_missing_shard(shards, tmp_path):
    (tmp_path / "two.safetensors").unlink()
    listing = list_directory(tmp_path)
    assert listing.lost == {"b", "c"}
    assert [t.name for t in listing.tensors] == ["a"]
    (problem,) = listing.problems
    assert problem.endswith("two.safetensors: missing shard: model.safetensors.index.json puts 2 tensors in it")


def test_wrong_index(shards, tmp_path):
    shards(b="one.safetensors", c=None, d="one.safetensors")
    problems = list_directory(tmp_path).problems
    assert [problem.split(": ", 1)[1] for problem in problems] == [
        "wrong index: puts b in one.safetensors, but no shard holds it",
        "wrong index: puts d in one.safetensors, but no shard holds it",
    ]
    shards(a="two.safetensors", c="one.safetensors")
    problems = list_directory(tmp_path).problems
    assert [problem.split(": ", 1)[1] for problem in problems] == [
        "wrong index: puts a in two.safetensors, but it is in one.safetensors",
        "wrong index: puts c in one.safetensors, but it is in two.safetensors",
    ]
    shards(c=None)
    (problem,) = list_directory(tmp_path).problems
    assert problem.endswith("wrong index: does not name c, which two.safetensors holds")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index.json: weight_map: expected an object, found nothing"):
        list_directory(tmp_path)


def test_directories_without_weights(tensors, tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        list_directory(tmp_path / "none")
    with pytest.raises(UserError, match=r"expected model.safetensors or model.safetensors.index.json$"):
        list_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"found pytorch_model.bin, which is not read"):
        list_directory(tmp_path)
    safetensors.numpy.save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"holds safetensors shards but no model.safetensors.index.json"):
        list_directory(tmp_path)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds both model.safetensors and model.safetensors.index.json"):
        list_directory(tmp_path)


def rewritten(path, change):
    """The file with another header, and the same data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": ["F32"]}, r"its header: a.dtype: expected a text.* found \[\"F32\"\]"),
        ({"dtype": "F31"}, r"its header: a.dtype: expected BOOL, .*, found 'F31'"),
        ({"shape": ["7", 5]}, r"its header: a.shape\[0\]: expected a whole number from 0.*, found '7'"),
        ({"shape": [-7, -5]}, r"its header: a.shape\[0\]: expected a whole number from 0.*, found -7"),
        ({"shape": [7.0, 5]}, r"its header: a.shape\[0\]: .*, found 7.0"),
        ({"shape": 35}, r"its header: a.shape: expected a list.*, found 35"),
        ({"data_offsets": ["0", 140]}, r"its header: a.data_offsets\[0\]: .*, found '0'"),
        ({"data_offsets": None}, r"its header: a.data_offsets: expected a list of 2.*, found null"),
        ({"data_offsets": [0, 140, 3]}, r"its header: a.data_offsets: expected a list of 2"),
        ({"data_offsets": [140, 0]}, r"its header: a.data_offsets: expected a begin and an end, found 140, 0"),
        ({"data_offsets": [0, True]}, r"its header: a.data_offsets\[1\]: .*, found true"),
        (
            {"data_offsets": [8, 148]},
            r"its header: \w (overlaps|is 8 bytes behind)|its header describes",
        ),
    ],
)
def test_headers_that_are_not_what_they_should_be(change, message, tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, path)
    rewritten(path, lambda header: header["a"].update(change))
    with pytest.raises(UserError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


def test_tensors_that_share_bytes_or_leave_some_out(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}, path)
    rewritten(path, lambda header: header["a"].update(data_offsets=header["b"]["data_offsets"]))
    with pytest.raises(UserError, match=r"a is 16 bytes behind the header|b overlaps a"):
        read_header(path)
    safetensors.numpy.save_file({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)}, path)
    rewritten(path, lambda header: header.pop("a"))
    with pytest.raises(UserError, match="b is 16 bytes behind the header; expected one after the other"):
        read_header(path)


def test_a_header_with_one_name_twice(tmp_path):
    path = tmp_path / "model.safetensors"
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    text = f'{{"a": {entry}, "a": {entry}}}'.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(UserError, match="its header: not readable as JSON: an object has 'a' twice"):
        read_header(path)


@pytest.mark.parametrize("name", [3, ["one.safetensors"], None, "../one.safetensors", "a/b.safetensors", "one.bin", ""])
def test_an_index_with_a_name_that_is_none(name, shards, tmp_path):
    shards()
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"weight_map.a: expected the name of a .safetensors file beside it, found"):
        list_directory(tmp_path)
