"""The prepare command: what it writes reads back the same, what it reports is what is there, what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import pathlib

import numpy as np
import pytest
from documented_keys import check as check_keys

from cfprm_jax import flags, prepare
from cfprm_jax.data import Trajectory, read
from cfprm_jax.data.formats import ReadReport
from cfprm_jax.data.windows import samples
from cfprm_jax.runtime import config_files

INPUTS = pathlib.Path(__file__).parent / "data" / "inputs"


def run(*arguments: str) -> int:
    return flags.run(prepare.PrepareConfig, prepare.main, ["prepare", *arguments])


def report_of(output: pathlib.Path) -> dict:
    return json.loads(output.with_name(output.name.split(".")[0] + ".report.json").read_text())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("options", [(), ("--window_tail=drop",), ("--window_stride=1",), ("--neutral=drop",)])
def test_output_read_back_gives_the_same_trajectories(tmp_path: pathlib.Path, suffix: str, options: tuple) -> None:
    output = tmp_path / f"out{suffix}"
    assert run(f"--input={INPUTS}/*.jsonl", "--granularities=3,whole,1", f"--output={output}", *options) == 0
    config = flags.parse(prepare.PrepareConfig, ["prepare", *options])
    whole = list(read(str(INPUTS / "*.jsonl"), neutral=config.read.neutral))
    expected = [
        sample
        for granularity in (3, "whole", 1)
        for trajectory in whole
        for sample in samples(trajectory, granularity, config.windows.window_tail, config.windows.window_stride)
    ]
    report = ReadReport()
    assert list(read(output, report=report)) == expected
    assert report.files == {output.name: "stepwise"}
    opened = gzip.open if suffix == ".jsonl.gz" else open
    with opened(output, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    order = [row["granularity"] for row in rows]
    assert order == sorted(order, key=[3, "whole", 1].index)
    # Math-Shepherd's rows have no answer and no id.
    first = next(row for row in rows if row["source"].startswith("math_shepherd"))
    assert list(first) == ["prompt", "completions", "labels", "granularity", "source"]


def test_labels_are_written_short_and_come_back_to_the_bit(tmp_path: pathlib.Path) -> None:
    values = [0.7, 1 / 3, 1e-7, 0.1, 1, 0, None]
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"prompt": "q", "completions": list("abcdefg"), "labels": values}) + "\n"
    )
    assert run(f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl") == 0
    written = json.loads((tmp_path / "out.jsonl").read_text())["labels"]
    assert written[:1] == [0.7]
    assert written[3:] == [0.1, 1.0, 0.0, None]
    (back,) = read(tmp_path / "out.jsonl")
    np.testing.assert_array_equal(back.labels, np.array(values, np.float32))


def test_separator_of_the_windows(tmp_path: pathlib.Path) -> None:
    separator = "--step_separator= \\n"
    assert run(f"--input={INPUTS}/ratings.jsonl", "--granularities=2", f"--output={tmp_path}/o.jsonl", separator) == 0
    assert next(read(tmp_path / "o.jsonl")).steps == ("Double 2. \nIt is 4.", "It is 5. \nDone.")


def test_report(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "deep" / "out.jsonl"
    assert run(f"--input={INPUTS}/prm800k.jsonl,{INPUTS}/rest_mcts.jsonl", "--c_max=2", f"--output={output}") == 0
    report = report_of(output)
    check_keys("NAME.report.json", report)
    assert report["config"]["c_max"] == 2
    assert report["files"] == {"prm800k.jsonl": "prm800k", "rest_mcts.jsonl": "rest_mcts"}
    assert (report["rows"], report["trajectories"], report["steps"]) == (12, 18, 29)
    assert report["labels"] == {"positive": 17, "negative": 5, "soft": 5, "unlabelled": 2}
    assert report["left_out"]["PRM800K completions without a rating, not chosen"] == 2
    assert list(report["granularities"]) == ["2", "1"]
    fine, coarse = report["granularities"]["1"], report["granularities"]["2"]
    once = {"labelled_steps": 27, "negative_steps": 9, "distinct_labelled_steps": 19, "distinct_negative_steps": 7}
    assert fine == {k: report[k] for k in ("trajectories", "steps", "labels")} | once | {
        "conflicting_steps": 1,
        "skipped": {},
        "tokens": None,
    }
    assert coarse["skipped"] == {"one step only: no coarse sample": 10}
    assert coarse["trajectories"] == 8
    assert coarse["steps"] == 11
    assert report["written"] == 26 == len(output.read_text().splitlines())
    assert report["bad_rows"] == []
    # The flags beside the output do the same again.
    again = flags.parse(prepare.PrepareConfig, ["prepare", f"--flagfile={output.parent}/out.flags"])
    assert json.loads(json.dumps(config_files.as_dict(again))) == report["config"]


def test_the_report_goes_to_its_flag(tmp_path: pathlib.Path) -> None:
    arguments = (
        f"--input={INPUTS}/ratings.jsonl",
        f"--output={tmp_path}/o.jsonl",
        f"--report={tmp_path}/r/report.json",
    )
    assert run(*arguments) == 0
    assert json.loads((tmp_path / "r/report.json").read_text())["trajectories"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.flags", "o.jsonl", "r"]


def test_whole_and_dropped_tails_are_counted(tmp_path: pathlib.Path) -> None:
    arguments = (f"--input={INPUTS}/ratings.jsonl", "--granularities=5,whole", "--window_tail=drop")
    assert run(*arguments, f"--output={tmp_path}/o.jsonl") == 0
    granularities = report_of(tmp_path / "o.jsonl")["granularities"]
    assert granularities["5"]["skipped"] == {"no whole window (--window_tail=drop)": 1}
    assert granularities["whole"]["trajectories"] == 1


def test_test_questions_are_left_out_and_counted(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    test_set = tmp_path / "test.json"
    test_set.write_text(
        json.dumps([{"problem": "what is $2+3+4$ ?"}, {"problem": "What is 5 + 5?"}, {"problem": "No."}])
    )
    inputs = f"--input={INPUTS}/prm800k.jsonl,{INPUTS}/stepwise.jsonl"
    assert run(inputs, "--c_max=2", f"--output={tmp_path}/o.jsonl", f"--exclude_questions={test_set}") == 0
    report = report_of(tmp_path / "o.jsonl")
    assert report["excluded"] == {"test_questions": 3, "questions": 2, "trajectories": 7}
    assert report["trajectories"] == 17
    assert report["granularities"]["1"]["trajectories"] == 10
    assert not {t.question for t in read(tmp_path / "o.jsonl")} & {"What is 2 + 3 + 4?", "What is 5 + 5?"}
    assert "excluded as test questions: 2 questions, 7 trajectories" in capsys.readouterr().out


def test_bad_rows_get_a_side_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "in.jsonl").write_text((INPUTS / "stepwise.jsonl").read_text() + "nonsense\n")
    arguments = (f"--input={tmp_path}/in.jsonl", "--c_max=2", f"--output={tmp_path}/o.jsonl.gz")
    assert run(*arguments) == 2
    assert run(*arguments, "--max_bad_rows=1") == 0
    (bad,) = [json.loads(line) for line in (tmp_path / "o.bad_rows.jsonl").read_text().splitlines()]
    assert (bad["file"], bad["line"], bad["excerpt"]) == ("in.jsonl", 5, "nonsense")
    assert report_of(tmp_path / "o.jsonl.gz")["bad_rows"] == [bad]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"prompt": "q", "completions": ["a", "b", "c"], "labels": [1, 0]}',
            "in.jsonl:1: row with 3 steps and 2 labels",
        ),
        ('{"prompt": "q", "completions": ["a"], "labels": [1.7]}', "in.jsonl:1: label 1.7 is outside [0, 1]"),
        ("", "in.jsonl: empty file"),
        ("not json", "in.jsonl:1: not JSON"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: pathlib.Path, capsys, content: str, message: str) -> None:
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "o.jsonl").write_text("an earlier result\n")
    assert run(f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/o.jsonl") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "o.jsonl"]
    assert (tmp_path / "o.jsonl").read_text() == "an earlier result\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--input is empty"),
        (("--input=x",), "--output is empty"),
        (("--input={in}", "--output={in}"), "is also an input"),
        (("--input={in}", "--output={dir}/o.parquet"), "o.parquet: expected"),
        (("--input={in}", "--output={dir}"), "is a directory"),
        (("--input={in}", "--output={dir}/o.jsonl", "--report={dir}/o.jsonl"), "is also an input or the output"),
        (("--input={in}", "--output={dir}/o.jsonl", "--report={in}"), "is also an input or the output"),
        (("--input={in}", "--output={dir}/o.jsonl", "--report={dir}"), "is a directory"),
        (("--input={in}", "--output={in}/o.jsonl"), "in.jsonl is a file"),
        (("--input={dir}/gone", "--output={dir}/o.jsonl"), "gone: no such file"),
        (("--input={in}", "--output={dir}/o.jsonl", "--schedule=shuffled"), "--schedule "),
        (("--input={in}", "--output={dir}/o.jsonl", "--exclude_questions={dir}/gone"), "gone: no such file"),
        (("--input={in}", "--output={dir}/o.jsonl", "--tokenizer={dir}/gone"), "gone"),
        (("--input={in}", "--output={dir}/o.jsonl", "--granularities=2,2"), "names one granularity twice"),
        (("--input={in}", "--output={dir}/o.jsonl", "--window_tail=drop"), "--window_tail=drop is for granularities"),
        (("--input={in}", "--output={dir}/o.jsonl", "--max_length=9"), "--max_length=9 is for token statistics, with"),
        (("--input={in}", "--output={dir}/o.jsonl", "--hard_threshold=2"), "--hard_threshold=2 is for --estimate=hard"),
    ],
)
def test_flags_that_make_no_sense(tmp_path: pathlib.Path, capsys, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "in.jsonl").write_text((INPUTS / "stepwise.jsonl").read_text())
    filled = [
        argument.replace("{in}", f"{tmp_path}/in.jsonl").replace("{dir}", str(tmp_path)) for argument in arguments
    ]
    assert run(*filled) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_questions_that_are_excluded_are_not_overwritten(tmp_path: pathlib.Path, capsys) -> None:
    source, seen = f"--input={INPUTS}/stepwise.jsonl", tmp_path / "test.jsonl"
    seen.write_text('{"question": "1+1?"}\n')
    for given in ((f"--output={seen}",), (f"--output={tmp_path}/o.jsonl", f"--report={seen}")):
        assert run(source, f"--exclude_questions={seen}", *given) == 2
        assert "is also an input" in capsys.readouterr().err
    assert seen.read_text() == '{"question": "1+1?"}\n'


def test_same_input_gives_the_same_bytes(tmp_path: pathlib.Path) -> None:
    for name in ("a", "b"):
        assert run(f"--input={INPUTS}/*.jsonl", "--c_max=3", f"--output={tmp_path}/{name}.jsonl.gz") == 0
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_it_prints_a_plan_and_a_summary(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--input={INPUTS}/prm800k.jsonl", "--c_max=2", f"--output={tmp_path}/o.jsonl") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"prepare: prm800k.jsonl (0.0 MB) -> {tmp_path}/o.jsonl\n")
    assert "granularities 2, 1; window tail keep, stride window" in captured.out
    assert "read 6 rows: 13 trajectories, 21 steps; 0 malformed rows skipped" in captured.out
    assert "C=2         100%, 13 trajectories" in captured.out


def test_token_statistics_with_a_real_tokenizer(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments = (f"--input={shared}/data/prm800k/original_samples.jsonl", f"--output={tmp_path}/o.jsonl", "--c_max=2")
    assert run(*arguments, f"--tokenizer={shared}/data/tokenizers/qwen2.5", "--max_length=200") == 0
    tokens = report_of(tmp_path / "o.jsonl")["granularities"]["1"]["tokens"]
    assert tokens["max_length"] == 200
    assert tokens["truncated"] > 0
    assert tokens["lengths"]["0"] < tokens["lengths"]["50"] < tokens["lengths"]["100"]
    assert 0.5 < tokens["redundant_prefix_share"] < 1


def test_leaking_corpus_is_found_whole(shared: pathlib.Path, tmp_path: pathlib.Path, capsys) -> None:
    data = shared / "data"
    arguments = (f"--input={data}/prm800k/phase1_test.jsonl", f"--exclude_questions={data}/math500/test.jsonl")
    assert run(*arguments, f"--output={tmp_path}/o.jsonl") == 0
    report = report_of(tmp_path / "o.jsonl")
    assert report["excluded"]["trajectories"] == report["trajectories"] == 3582
    assert report["written"] == 0
    assert "the output is empty" in capsys.readouterr().out


def test_phase_1_round_trip(shared: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = shared / "data/prm800k/phase1_test.jsonl"
    assert run(f"--input={path}", f"--output={tmp_path}/o.jsonl") == 0
    report = report_of(tmp_path / "o.jsonl")
    assert (report["trajectories"], report["steps"], report["labels"]["negative"]) == (3582, 53734, 1970)
    back = list(read(tmp_path / "o.jsonl"))
    assert back == list(read(path))
    assert isinstance(back[0], Trajectory)


ROWS = f"--input={pathlib.Path(__file__).parent}/data/inputs/stepwise.jsonl"


@pytest.mark.parametrize("flag", ["output", "report"])
def test_an_output_that_is_no_file_is_an_error_and_unchanged(tmp_path, capsys, flag) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (("/dev/full", "a device"), (str(tmp_path / "pipe"), "a pipe")):
        arguments = {"output": f"{tmp_path}/o.jsonl", flag: path}
        assert run(ROWS, *(f"--{name}={value}" for name, value in arguments.items())) == 2
        assert f"--{flag}={path} is {kind}" in capsys.readouterr().err
        assert not pathlib.Path(path).is_file()


def test_a_full_disk_is_reported_and_leaves_no_output(tmp_path, capsys, monkeypatch) -> None:
    # /dev/full takes every write and loses it when it is flushed, at the latest on closing.
    original = pathlib.Path.open

    def full(path, *arguments, **options):
        if ".partial-" in path.name:
            return original(pathlib.Path("/dev/full"), "wb")
        return original(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", full)
    for name in ("o.jsonl", "o.jsonl.gz"):
        assert run(ROWS, f"--output={tmp_path / name}") == 2
        assert "No space left on device" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
