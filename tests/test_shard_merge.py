"""score --shard and --merge, sample --shard and --merge: the bytes of one process, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import jax
import pytest
from exported_prm import export_random
from tiny_runs import finish, free_port

from cfprm_jax import flags, prm_bench, process_bench, score, synthetic

WORLD = synthetic.WorldConfig(train_problems=2, held_out_problems=13, solutions_per_problem=2, candidates_per_problem=3)
COUNT = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return synthetic.materialise(tmp_path_factory.mktemp("world"), 0, WORLD)


@pytest.fixture(scope="module")
def prm(world, tmp_path_factory):
    return export_random(world.model, tmp_path_factory.mktemp("export") / "prm")


@pytest.fixture(scope="module")
def run(prm, world, tmp_path_factory):
    """score, with its compiled shapes kept between runs."""
    devices, cache = jax.devices()[:1], tmp_path_factory.mktemp("compiled")

    def run(*arguments: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "devices", lambda *_: devices)
            return flags.run(score.ScoreConfig, score.main, ["score", f"--compile_cache_dir={cache}", *arguments])

    return run


@pytest.fixture(scope="module")
def parts(run, prm, world, tmp_path_factory):
    """The parts of eight shares and, as whole.00000-of-00001.jsonl, what one process writes."""
    folder = tmp_path_factory.mktemp("parts")
    for index in range(COUNT):
        assert (
            run(f"--model={prm}", f"--input={world.candidates}", f"--output={folder}/p.jsonl", f"--shard={index}/8")
            == 0
        )
    assert run(f"--model={prm}", f"--input={world.candidates}", f"--output={folder}/whole.jsonl", "--shard=0/1") == 0
    return folder


def test_eight_merged_are_the_bytes_of_one(run, prm, world, parts, tmp_path, capsys) -> None:
    whole = (parts / "whole.00000-of-00001.jsonl").read_bytes()
    assert whole.count(b"\n") == 13
    assert run(f"--merge={parts}/p.*.jsonl", f"--output={tmp_path}/merged.jsonl") == 0
    assert (tmp_path / "merged.jsonl").read_bytes() == whole
    assert "13 rows of 8 parts" in capsys.readouterr().out
    # An empty share is a part, too.
    sizes = [len((parts / f"p.{i:05}-of-00008.jsonl").read_text().splitlines()) for i in range(COUNT)]
    assert sum(sizes) == 13 and max(sizes) < 13


def test_other_flags_than_those_of_the_parts_are_refused(run, parts, tmp_path, capsys) -> None:
    """They would change nothing: the rows are those of the parts."""
    merge = (f"--merge={parts}/p.*.jsonl", f"--output={tmp_path}/merged.jsonl")
    assert run(*merge, "--packing=none") == 2
    message = "--packing is 'none', but the parts of --merge were written with 'tree'"
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert run(*merge, "--packing=tree", "--mesh=data=1") == 0


def test_a_killed_share_resumes(run, prm, world, parts, tmp_path, capsys) -> None:
    sizes = {i: (parts / f"p.{i:05}-of-00008.jsonl").read_bytes().count(b"\n") for i in range(COUNT)}
    index = max(sizes, key=sizes.__getitem__)
    shutil.copytree(parts, tmp_path / "parts")
    part = tmp_path / "parts" / f"p.{index:05}-of-00008.jsonl"
    content = part.read_bytes()
    # What a kill leaves: a row and a half.
    part.unlink()
    part.with_name(f"{part.name}.partial").write_bytes(content[: content.index(b"\n") + 40])
    merge = (f"--merge={tmp_path}/parts/p.*.jsonl", f"--output={tmp_path}/merged.jsonl")
    assert run(*merge) == 2
    assert f"{part.name}.partial is not finished" in capsys.readouterr().err
    given = (
        f"--model={prm}",
        f"--input={world.candidates}",
        f"--output={tmp_path}/parts/p.jsonl",
        f"--shard={index}/8",
    )
    assert run(*given, "--resume=auto") == 0
    assert part.read_bytes() == content
    assert run(*merge) == 0
    assert (tmp_path / "merged.jsonl").read_bytes() == (parts / "whole.00000-of-00001.jsonl").read_bytes()


def edit(path, **changes) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda folder: (folder / "p.00003-of-00008.jsonl").unlink(), "1 of 8 parts are missing: 3/8"),
        (lambda folder: (folder / "p.00003-of-00008.jsonl.config.json").unlink(), "missing or damaged"),
        (lambda folder: edit(folder / "p.00003-of-00008.jsonl.config.json", shard="2/8"), "are both part 2/8"),
        (lambda folder: edit(folder / "p.00003-of-00008.jsonl.config.json", shard="3/9"), "parts of two sets"),
        (lambda folder: edit(folder / "p.00003-of-00008.jsonl.config.json", shard=""), "without --shard"),
        (lambda folder: edit(folder / "p.00003-of-00008.jsonl.config.json", dtype="bfloat16"), "--dtype ('bfloat16'"),
        (
            lambda folder: edit(
                folder / "p.00003-of-00008.jsonl.config.json", fingerprint={"model": "x", "input": "y"}
            ),
            "differ in input, model",
        ),
        (lambda folder: edit(folder / "p.00003-of-00008.jsonl.config.json", resolved={"step": 7}), "differ in"),
    ],
)
def test_what_does_not_belong_together(run, parts, tmp_path, capsys, fault, message) -> None:
    shutil.copytree(parts, tmp_path / "parts")
    fault(tmp_path / "parts")
    assert run(f"--merge={tmp_path}/parts/p.*.jsonl", f"--output={tmp_path}/merged.jsonl") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "merged.jsonl").exists()


def test_rows_that_are_not_the_inputs(run, parts, world, tmp_path, capsys) -> None:
    def refused(*words: str) -> None:
        assert run(f"--merge={tmp_path}/parts/p.*.jsonl", f"--output={tmp_path}/merged.jsonl") == 2
        error = capsys.readouterr().err
        assert all(word in error for word in words), error
        assert not (tmp_path / "merged.jsonl").exists()

    name = next(p.name for p in sorted(parts.glob("p.*.jsonl")) if p.read_bytes().count(b"\n") > 1)
    lines = (parts / name).read_text().splitlines(keepends=True)
    for content, words in (
        (lines[:-1], ("ends before the row of",)),
        ([*lines, lines[0]], ("has more rows",)),
        (lines[::-1], ("has the question",)),
        ([lines[0].replace('"answer"', '"reply"'), *lines[1:]], ("has other contents",)),
    ):
        shutil.copytree(parts, tmp_path / "parts", dirs_exist_ok=True)
        (tmp_path / "parts" / name).write_text("".join(content))
        refused(name, *words)
    other = tmp_path / "other.jsonl"
    other.write_text(world.candidates.read_text().replace("id", "ID", 1))
    assert run(f"--merge={parts}/p.*.jsonl", f"--input={other}", f"--output={tmp_path}/merged.jsonl") == 2
    assert "from other contents than those of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge=x", "--output="], "--output is empty"),
        (["--merge=x", "--output=y", "--model=z"], "--merge scores nothing"),
        (["--merge=/nowhere/*.jsonl", "--output=y"], "no such file matches"),
        (["--model={prm}", "--input={candidates}", "--output=y", "--shard=8/8"], "--shard=8/8"),
    ],
)
def test_flags(run, prm, world, capsys, arguments, message) -> None:
    assert run(*(argument.format(prm=prm, candidates=world.candidates) for argument in arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [process_bench, prm_bench])
def test_benchmarks(command, prm, tmp_path, capsys) -> None:
    """Two shares merged evaluate as one process does; an evaluation writes what it would have scored itself."""
    steps = ["four-one=three", "so=three"]
    questions = [f"start=four-{'one+' * i}one" for i in range(4)]
    name = command.__name__.rpartition(".")[2]
    if command is process_bench:
        given = [
            {"id": f"world-{i}", "problem": q, "steps": steps[: 1 + i % 2], "label": -1}
            for i, q in enumerate(questions)
        ]
    else:
        given = [
            {
                "original_question": "q",
                "modified_question": q,
                "original_process": steps,
                "modified_process": steps,
                "error_steps": [1],
                "classification": "confidence",
                "idx": f"prm_{i}",
            }
            for i, q in enumerate(questions)
        ]
    rows = tmp_path / "world.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = command.ProcessBenchConfig if command is process_bench else command.PRMBenchConfig
    devices = jax.devices()[:1]

    def run(output: str, *arguments: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "devices", lambda *_: devices)
            given = [name, "--compile_cache_dir=", f"--input={rows}", f"--output_dir={tmp_path / output}", *arguments]
            return flags.run(config, command.main, given)

    # With a slash at the end, too; and what is evaluated later may be chosen later.
    for index, (slash, threshold) in enumerate([("/", 0.3), ("", 0.4)]):
        assert run(f"two{slash}", f"--model={prm}", f"--shard={index}/2", f"--threshold={threshold}") == 0
    capsys.readouterr()
    for unnamed in (".", "new/.."):
        assert run(unnamed, f"--model={prm}", "--shard=0/2", f"--output_dir={unnamed}") == 2
        assert f"--output_dir={unnamed} " in capsys.readouterr().err
    assert run("one", f"--model={prm}", "--shard=0/1") == 0
    part = tmp_path / "one.00000-of-00001.jsonl"
    content = part.read_bytes()
    # What a kill leaves: a row and a half. The same command scores the others.
    part.unlink()
    part.with_name(f"{part.name}.partial").write_bytes(content[: content.index(b"\n") + 40])
    assert run("one", f"--model={prm}", "--shard=0/1") == 0
    assert part.read_bytes() == content
    assert not (tmp_path / "two").exists()
    assert run("two", f"--merge={tmp_path}/two.*.jsonl") == 0
    assert run("one", f"--merge={tmp_path}/one.*.jsonl") == 0
    written = "predictions.jsonl" if command is process_bench else "scores.jsonl"
    assert (tmp_path / "two" / written).read_bytes() == (tmp_path / "one" / written).read_bytes()
    # The results name the PRM, its encoding and all else as those of one process do.
    assert run("whole", f"--model={prm}") == 0
    results = {name: json.loads((tmp_path / name / "results.json").read_text()) for name in ("two", "whole")}
    for name, found in results.items():
        assert found["config"].pop("output_dir") == str(tmp_path / name)
    assert results["two"]["config"].pop("merge") and results["whole"]["config"].pop("merge") == []
    assert results["whole"]["config"]["model"] == str(prm) and results["whole"]["config"]["encoding"] == "cfprm"
    assert results["two"] == results["whole"]
    capsys.readouterr()
    assert run("three", f"--merge={tmp_path}/two.00000-of-00002.jsonl") == 2
    assert "1 of 2 parts are missing: 1/2" in capsys.readouterr().err
    assert run("three", "--shard=0/2", f"--merge={tmp_path}/two.*.jsonl") == 2
    assert run("three", "--shard=0/2") == 2


SHARE = """
import sys
import jax

port, index, *arguments = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
from cfprm_jax import flags, score

sys.exit(flags.run(score.ScoreConfig, score.main, ["score", "--shard=auto", *arguments]))
"""


def test_two_processes_of_jax_distributed_have_a_share_each(run, prm, world, parts, tiny, tmp_path) -> None:
    """On their own devices, of which each sees those of both."""
    port = str(free_port())
    given = [f"--model={prm}", f"--input={world.candidates}", f"--output={tmp_path}/p.jsonl"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARE, port, str(index), *given, f"--compile_cache_dir={tmp_path / 'compiled'}"],
            env=tiny.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for process in processes:
        finish(process)
    assert run(f"--merge={tmp_path}/p.*.jsonl", f"--output={tmp_path}/merged.jsonl") == 0
    merged = (tmp_path / "merged.jsonl").read_text().splitlines()
    whole = (parts / "whole.00000-of-00001.jsonl").read_text().splitlines()
    for one, other in zip(map(json.loads, merged), map(json.loads, whole), strict=True):
        assert one["id"] == other["id"]
        for a, b in zip(one["candidates"], other["candidates"], strict=True):
            assert a["step_logits"] == pytest.approx(b["step_logits"], abs=1e-5)  # compiled with other options
