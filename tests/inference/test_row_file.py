"""Outputs that grow by rows: no row is lost or repeated, and rows of other inputs are not resumed."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.inference.row_file import open_rows
from cfprm_jax.runtime.digests import of_paths

ROWS = [{"number": number, "text": "é" * number} for number in range(5)]
CONFIG, PRINT = {"seed": 0, "resume": "never"}, {"model": "m", "input": "i"}


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(output, rows=ROWS, resume="never", config=CONFIG, fingerprint=PRINT):
    with open_rows(output, resume, config, fingerprint) as file:
        for row in rows[file.done :] if not file.complete else ():
            file.write(row)
        return file.done


def stopped_after(output, count, rows=ROWS):
    with pytest.raises(InterruptedError), open_rows(output, "auto", CONFIG, PRINT) as file:
        for row in rows[file.done : count]:
            file.write(row)
        raise InterruptedError


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_file_has_its_name_when_all_is_there(tmp_path):
    output = tmp_path / "new" / "out.jsonl"
    assert write(output) == 0
    assert output.read_bytes() == lines(ROWS)
    assert names(output.parent) == {"out.jsonl", "out.jsonl.config.json"}
    assert json.loads((tmp_path / "new" / "out.jsonl.config.json").read_text()) == {**CONFIG, "fingerprint": PRINT}


def test_what_is_known_only_later_must_be_the_same_too(tmp_path):
    """Such as the checkpoint that was whole: rows of two are never in one file."""

    def begin(step):
        with open_rows(tmp_path / "out.jsonl", "auto", CONFIG, PRINT) as file:
            file.require("step", step)
            file.write(ROWS[file.done])
            raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            begin(7)
    with pytest.raises(UserError, match=r"out.jsonl.config.json: the 2 rows .*step 7.*step 6"):
        begin(6)
    with open_rows(tmp_path / "out.jsonl", "auto", CONFIG, PRINT) as file:
        assert file.done == 2
        file.require("step", 7)


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_it_resumes_where_it_stopped(tmp_path, name, count):
    output = tmp_path / name
    stopped_after(output, count)
    assert not output.exists() and (count > 0) == (tmp_path / f"{name}.partial").exists()
    assert write(output, resume="auto") == count
    found = output.read_bytes()
    assert (gzip.decompress(found) if name.endswith("gz") else found) == lines(ROWS)
    assert names(tmp_path) == {name, f"{name}.config.json"}
    write(tmp_path / f"straight_{name}")
    assert (tmp_path / f"straight_{name}").read_bytes() == found


@pytest.mark.parametrize("rest", [b"{", b'{"number": 2, "te', b"\xc3"])
def test_half_a_row_is_dropped(tmp_path, rest):
    output = tmp_path / "out.jsonl"
    stopped_after(output, 2)
    with (tmp_path / "out.jsonl.partial").open("ab") as file:
        file.write(rest)
    assert write(output, resume="always") == 2
    assert output.read_bytes() == lines(ROWS)


def test_never_refuses_what_was_begun_or_is_there(tmp_path):
    output = tmp_path / "out.jsonl"
    stopped_after(output, 2)
    with pytest.raises(UserError, match=r"--output=.*\(out\.jsonl\.partial\)"):
        write(output)
    write(output, resume="auto")
    with pytest.raises(UserError, match=f"--output={output} "):
        write(output)
    with open_rows(output, "auto", CONFIG, PRINT) as file:
        assert file.complete
    with pytest.raises(UserError, match=r"--resume=always: .*other\.jsonl"):
        write(tmp_path / "other.jsonl", resume="always")


@pytest.mark.parametrize("finished", [False, True])
def test_other_flags_or_inputs_are_refused_by_name(tmp_path, finished):
    output = tmp_path / "out.jsonl"
    write(output) if finished else stopped_after(output, 2)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for config, fingerprint, named in (
        ({**CONFIG, "seed": 1}, PRINT, "--seed"),
        ({**CONFIG, "new": 1}, PRINT, "--new"),
        (CONFIG, {**PRINT, "model": "other"}, "model"),
        ({**CONFIG, "seed": 1}, {"model": "other", "input": "j"}, "--seed, model, input"),
    ):
        with pytest.raises(UserError, match=f"--output=.* another {named}:"):
            write(output, resume="auto", config=config, fingerprint=fingerprint)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert write(output, resume="auto", config={**CONFIG, "resume": "auto"}) == (0 if finished else 2)


def test_two_processes_do_not_write_one_file(tmp_path):
    output = tmp_path / "out.jsonl"
    with open_rows(output, "auto", CONFIG, PRINT) as file:
        file.write(ROWS[0])
        with pytest.raises(UserError, match="another process"):
            write(output, resume="auto")
        for row in ROWS[1:]:
            file.write(row)
    assert output.read_bytes() == lines(ROWS)


def test_fingerprints_identify_contents(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = folder / "weights"
    content = bytearray(1_000_000)
    weights.write_bytes(content)
    (folder / "config").write_text("a")
    seen = {of_paths([folder])}
    assert of_paths([folder]) in seen
    for place in (0, 999_999):
        changed = bytearray(content)
        changed[place] = 1
        weights.write_bytes(changed)
        seen.add(of_paths([folder]))
    weights.write_bytes(content[:-1])
    seen.add(of_paths([folder]))
    (folder / "config").write_text("b")
    seen.add(of_paths([folder]))
    (folder / "config").rename(folder / "other")
    seen.add(of_paths([folder]))
    assert len(seen) == 6
    changed = bytearray(content)
    changed[5000] = 1
    weights.write_bytes(content)
    whole = of_paths([weights])
    weights.write_bytes(changed)
    assert of_paths([weights]) != whole


def test_an_output_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (("/dev/full", "a device"), (tmp_path / "pipe", "a pipe"), (tmp_path, "a directory")):
        for resume in ("never", "auto"):
            with pytest.raises(UserError, match=f"--output={path} is {kind}"):
                write(path, resume=resume)
