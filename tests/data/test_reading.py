"""The reader as a whole: telling formats apart, several files, records, malformed rows, flat memory."""

from __future__ import annotations

import gzip
import json
import pathlib
import tracemalloc
import types

import pyarrow
import pyarrow.parquet
import pytest

import cfprm_jax.data
from cfprm_jax.config import DATA_FORMATS
from cfprm_jax.data.formats import BadRow, ReadReport, read, reading, registry, write_bad_rows
from cfprm_jax.data.formats.fields import Solution
from cfprm_jax.data.formats.grouping import Grouping
from cfprm_jax.errors import UserError

INPUTS = pathlib.Path(__file__).parent / "inputs"
# A new format: rows are single steps, and "end" ends a record.
SINGLE_STEPS = types.ModuleType("single_steps")
SINGLE_STEPS.NAME, SINGLE_STEPS.FIELDS = "single_steps", ("step", "end")
SINGLE_STEPS.matches = lambda row: "step" in row
SINGLE_STEPS.parse = lambda row, options: [Solution(row["of"], [row["step"]], [row["value"]], id=str(row["end"]))]


class _Steps(Grouping):
    def __init__(self):
        super().__init__()
        self.rows = []

    def continues(self, row):
        return self.rows[-1].id == "False"

    def add(self, row):
        self.rows += row
        return ()

    def finish(self):
        steps, labels = zip(*((row.steps[0], row.labels[0]) for row in self.rows), strict=True)
        return [Solution(self.rows[0].question, steps, labels)]


SINGLE_STEPS.GROUPING = _Steps
NAMES = ("prm800k", "stepwise", "math_shepherd", "rlhflow", "rest_mcts", "math_aps", "ratings")


def stepwise(question: str, *labels) -> str:
    return json.dumps({"prompt": question, "completions": ["s"] * len(labels), "labels": list(labels)}) + "\n"


def test_formats_are_detected_by_content(tmp_path: pathlib.Path) -> None:
    report = ReadReport()
    assert list(read(str(INPUTS / "*.jsonl"), report=report))
    assert report.files == {f"{name}.jsonl": name for name in NAMES}
    assert report.fraction == 1.0
    for name in NAMES:
        (tmp_path / "unnamed").write_bytes((INPUTS / f"{name}.jsonl").read_bytes())
        detected, named = list(read(tmp_path / "unnamed")), list(read(tmp_path / "unnamed", data_format=name))
        assert detected == named


@pytest.mark.parametrize("name", NAMES)
def test_wrappings_give_the_same_trajectories(tmp_path: pathlib.Path, name: str) -> None:
    plain = (INPUTS / f"{name}.jsonl").read_bytes()
    rows = [json.loads(line) for line in plain.splitlines()]
    expected = list(read(INPUTS / f"{name}.jsonl"))
    same_name = tmp_path / f"{name}.jsonl"
    for content in (gzip.compress(plain), json.dumps(rows).encode() + b"\n", plain.replace(b"\n", b"\r\n")):
        same_name.write_bytes(content)
        found = list(read(same_name))
        assert [(t.question, t.steps, t.labels.tobytes()) for t in found] == [
            (t.question, t.steps, t.labels.tobytes()) for t in expected
        ]


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([True, False], pyarrow.bool_()),
        ([1, 0], pyarrow.int64()),
        ([1, -100], pyarrow.int64()),
        ([0.7, None], pyarrow.float32()),
        ([0.7, float("nan")], pyarrow.float64()),
    ],
)
def test_stepwise_parquet(tmp_path: pathlib.Path, labels: list, kind: pyarrow.DataType) -> None:
    table = pyarrow.table(
        {
            "prompt": ["q", "q"],
            "completions": [["a", "b"], ["c", "d"]],
            "labels": pyarrow.array([labels, labels], pyarrow.list_(kind)),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    value = None if labels[1] in (None, -100) or labels[1] != labels[1] else labels[1]
    assert list(read(str(tmp_path / "*.parquet"))) == [
        cfprm_jax.data.Trajectory("q", steps, [labels[0], value], "train-00000-of-00001.parquet:1")
        for steps in (("a", "b"), ("c", "d"))
    ]


def test_records_are_runs_of_a_question_within_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text(stepwise("q", 1) + stepwise("q", 0) + stepwise("r", 1) + stepwise("q", 1))
    (tmp_path / "b.jsonl").write_text(stepwise("q", 1))
    sources = [t.source for t in read([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])]
    assert sources == ["a.jsonl:1", "a.jsonl:1", "a.jsonl:3", "a.jsonl:4", "b.jsonl:1"]


def test_prm800k_records_of_one_question_stay_apart(tmp_path: pathlib.Path) -> None:
    line = (INPUTS / "prm800k.jsonl").read_text().splitlines()[2]
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line}\n")
    assert [t.source for t in read(tmp_path / "a.jsonl")] == ["a.jsonl:1", "a.jsonl:2"]


def test_files_of_one_name_are_different_records(tmp_path: pathlib.Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(stepwise("q", 1))
    sources = [t.source for t in read(str(tmp_path / "*" / "a.jsonl"))]
    assert sources == [f"{tmp_path}/x/a.jsonl:1", f"{tmp_path}/y/a.jsonl:1"]


BROKEN = stepwise("q", 1) + "nonsense\n" + stepwise("q", 0.5, 2) + '{"prompt": "q"}\n' + stepwise("q", 0)


def test_bad_rows_are_skipped_counted_and_listed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text(BROKEN)
    bad: list[BadRow] = []
    report = ReadReport()
    found = list(read(tmp_path / "a.jsonl", max_bad_rows=3, bad_rows=bad, report=report))
    # A malformed row between two of one question does not end their record.
    assert [(t.source, t.labels.tolist()) for t in found] == [("a.jsonl:1", [1]), ("a.jsonl:1", [0])]
    assert [str(row) for row in bad] == [
        "a.jsonl:2: not JSON: Expecting value at column 1",
        "a.jsonl:3: label 2 is outside [0, 1]",
        "a.jsonl:4: missing field 'completions'; found: prompt",
    ]
    assert bad == report.bad_rows
    assert (report.rows, report.trajectories) == (5, 2)
    write_bad_rows(tmp_path / "bad_rows.jsonl", bad)
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert listed[0] == {
        "file": "a.jsonl",
        "line": 2,
        "reason": "not JSON: Expecting value at column 1",
        "excerpt": "nonsense",
    }


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (0, "a.jsonl:2: not JSON: Expecting value at column 1"),
        (2, "a.jsonl:4: missing field 'completions'; found: prompt (after 2 that --max_bad_rows allows)"),
    ],
)
def test_one_bad_row_too_many_stops(tmp_path: pathlib.Path, allowed: int, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(BROKEN)
    with pytest.raises(UserError) as error:
        list(read(tmp_path / "a.jsonl", max_bad_rows=allowed))
    assert str(error.value) == message


def test_bad_rows_are_allowed_over_all_files_together(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(stepwise("q", 1) + stepwise("q", 3))
    assert len(list(read(str(tmp_path / "*.jsonl"), max_bad_rows=2))) == 2
    with pytest.raises(UserError, match=r"b\.jsonl:2: label 3 is outside"):
        list(read(str(tmp_path / "*.jsonl"), max_bad_rows=1))


def test_what_a_malformed_row_would_leave_out_is_not_counted(tmp_path: pathlib.Path) -> None:
    unrated = {"completions": [{"text": "a", "rating": None}], "human_completion": None, "chosen_completion": None}
    human = {"text": "b", "rating": None}
    bad = {"question": {"problem": "q"}, "label": {"steps": [unrated | {"human_completion": human}, {}]}}
    good = (INPUTS / "prm800k.jsonl").read_text().splitlines()[2]
    (tmp_path / "a.jsonl").write_text(f"{good}\n{json.dumps(bad)}\n")
    report = ReadReport()
    list(read(tmp_path / "a.jsonl", max_bad_rows=1, report=report))
    assert report.left_out == {}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "a.jsonl: empty file"),
        ('{"x": 1, "y": 2}\n', {}, "a.jsonl:1: unknown format: found the fields x, y; known: stepwise (prompt, "),
        ("{}\n", {}, "a.jsonl:1: unknown format: found the fields none"),
        ('{"prompt": "q", "completions": []}\n', {}, "a.jsonl:1: missing field labels of the stepwise format"),
        ('{"problem": "q", "steps": []}\n', {}, "a.jsonl:1: missing field ratings of the ratings format"),
        (
            stepwise("q", 1),
            {"data_format": "ratings"},
            "a.jsonl:1: missing field 'problem'; found: prompt, completions",
        ),
        (stepwise("q", 1), {"data_format": "csv"}, "data format 'csv' is not among: auto, prm800k"),
        (stepwise("q", 1), {"neutral": "maybe"}, "neutral 'maybe' is not among: positive, negative, drop"),
        ("nonsense\n", {"max_bad_rows": 1}, "a.jsonl: not one trajectory (1 rows, 1 of them malformed)"),
    ],
)
def test_what_stops_the_reading(tmp_path: pathlib.Path, content: str, options: dict, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        list(read(tmp_path / "a.jsonl", **options))
    assert str(error.value).startswith(message)


def test_a_missing_file_is_an_error_before_the_first_trajectory(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "gone.jsonl")


@pytest.mark.parametrize("form", ["lines", "array", "gzip", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: pathlib.Path, form: str) -> None:
    def peak(rows: int) -> int:
        content = [
            {"prompt": f"q{row}", "completions": ["s" * 500] * 4, "labels": [1, 0, 1, 0.5]} for row in range(rows)
        ]
        path = tmp_path / f"{rows}"
        if form == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path, row_group_size=500)
        else:
            text = json.dumps(content) if form == "array" else "".join(json.dumps(row) + "\n" for row in content)
            path.write_bytes(gzip.compress(text.encode()) if form == "gzip" else text.encode())
        del content
        tracemalloc.start()
        assert sum(1 for _ in read(path)) == rows
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    # Some 2 KB a row: the larger file is 10 MB.
    peak(100)
    assert peak(5_000) < peak(1_000) + 2_000_000


def test_every_format_can_be_named() -> None:
    assert {"auto", *(module.NAME for module in registry.FORMATS)} == set(DATA_FORMATS)


def test_a_format_of_rows_that_make_records_needs_no_edit_of_the_reader(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "FORMATS", (*registry.FORMATS, SINGLE_STEPS))
    rows = [("q", "a", 1, False), ("q", "b", 0.5, True), ("r", "c", 0, True), ("r", "d", 3, True), ("r", "e", 1, False)]
    text = "".join(json.dumps(dict(zip(("of", "step", "value", "end"), row, strict=True))) + "\n" for row in rows)
    (tmp_path / "x").write_text(text)
    found = list(read(tmp_path / "x", max_bad_rows=1))
    assert [(t.question, t.steps, t.labels.tolist(), t.source) for t in found] == [
        ("q", ("a", "b"), [1, 0.5], "x:1"),
        ("r", ("c",), [0], "x:3"),
        ("r", ("e",), [1], "x:5"),
    ]
