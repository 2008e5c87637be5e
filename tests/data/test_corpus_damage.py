"""Corrupted tokenised corpora: never other tokens, labels or sources; the corpus is rebuilt, with a line in the log."""

from __future__ import annotations

import pathlib
import random
import shutil
import subprocess

import pytest

from cfprm_jax.config import EncodingConfig, GranularityConfig, ReadConfig
from cfprm_jax.data import corpus_build, corpus_files
from cfprm_jax.data.corpus import Corpus, open_corpus
from cfprm_jax.data.loader import difference
from cfprm_jax.errors import UserError

ROWS = [
    {"prompt": f"question {i // 2}", "completions": [f"s{i}", "t", "u"], "labels": [1, 0.25 * (i % 4), None]}
    for i in range(12)
]
FILES = [
    f"{granularity}/{name}.bin" for granularity in (1, 2) for name in ("data", "index", "order", "records", "sources")
]


@pytest.fixture
def opened(tmp_path, make_rows, tokenizer):
    """open_corpus on the rows; its log lines are in its .logged."""
    path = make_rows(tmp_path / "rows.jsonl", ROWS)

    def call(path=path) -> Corpus:
        call.logged.clear()
        return open_corpus(
            path,
            ReadConfig(),
            GranularityConfig(c_max=2),
            EncodingConfig(system_prompt="S", max_length=200),
            tokenizer,
            cache_dir=tmp_path / "cache",
            log=call.logged.append,
        )

    call.logged = []
    return call


def content(corpus: Corpus) -> list:
    """All that anything reads of it."""
    out: list = [corpus.fingerprint, corpus.identity, corpus.report, corpus.max_steps, corpus.max_tokens]
    for granularity in corpus.granularities:
        reader = corpus[granularity]
        out += [reader.order.tolist(), reader.record_starts.tolist()]
        for place in range(len(reader)):
            found = reader[place]
            out += [found.tokens.tobytes(), found.step_positions.tobytes(), found.labels.tobytes(), found.steps_cut]
            out.append(reader.source(place))
    return out


def mutations(raw: bytes, rng: random.Random) -> dict[str, bytes | None]:
    out: dict[str, bytes | None] = {"gone": None, "emptied": b"", "cut": raw[:-1], "halved": raw[: len(raw) // 2]}
    out["longer"] = raw + b"\0"
    for bit in rng.sample(range(8 * len(raw)), 8):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        out[f"bit {bit}"] = bytes(flipped)
    # Words that have changed places, which sums would not see.
    out["swapped"] = raw[4:8] + raw[:4] + raw[8:]
    out["zeros"] = bytes(len(raw))
    return {name: changed for name, changed in out.items() if changed != raw}


def test_whatever_happens_to_a_file_it_is_made_again(opened, tmp_path) -> None:
    rng = random.Random(0)
    expected = content(opened())
    assert opened.logged == []
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    count = 0
    for name in (*FILES, "corpus.json"):
        raw = (directory / name).read_bytes()
        for what, changed in mutations(raw, rng).items():
            path = directory / name
            if changed is None:
                path.unlink()
            else:
                path.write_bytes(changed)
            assert content(opened()) == expected, f"{name}: {what}"
            (line,) = opened.logged or [""]
            harmless = name == "corpus.json" and not line  # such as a blank that is another
            assert harmless or (f"{directory / name}" in line and "\n" not in line), f"{name}: {what}: {line}"
            assert harmless or path.read_bytes() == raw
            path.write_bytes(raw)
            count += 1
    for gone in (directory / "2", directory):
        shutil.rmtree(gone)
        assert content(opened()) == expected
    assert count > 150
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {directory.name, "contents.json"}


def test_pieces_of_large_files(opened, tmp_path, monkeypatch) -> None:
    """Files of several pieces, compared by several threads: each bit of every piece counts."""
    monkeypatch.setattr(corpus_files, "_PIECE", 64)
    monkeypatch.setattr(corpus_files, "_READ", 24)
    expected = content(opened())
    path = next((tmp_path / "cache").glob("*/1/data.bin"))
    raw = path.read_bytes()
    assert len(raw) > 10 * 64
    for place in (0, 63, 64, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        assert content(opened()) == expected and len(opened.logged) == 1


def test_a_corpus_that_another_process_has_made_again_stays(opened, tmp_path, monkeypatch) -> None:
    """Two find the same damage; the slower one takes what the faster one has made."""
    from cfprm_jax.data import corpus as module

    expected = content(opened())
    path = next((tmp_path / "cache").glob("*/1/data.bin"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    remove = module._remove

    def other_was_faster(directory: pathlib.Path) -> None:
        path.write_bytes(raw)
        monkeypatch.setattr(corpus_build, "build", lambda *_: pytest.fail("built again"))
        remove(directory)

    monkeypatch.setattr(module, "_remove", other_was_faster)
    assert content(opened()) == expected and len(opened.logged) == 1


def test_a_disk_that_cannot_be_written_to_is_an_error(opened, tmp_path) -> None:
    opened()
    directory = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    if subprocess.run(["mount", "--bind", "-r", directory.parent, directory.parent], capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    try:
        assert content(opened())  # reading needs no writing
    finally:
        subprocess.run(["umount", directory.parent], check=True)


def test_a_file_that_was_renamed_or_moved_is_the_same_data(opened, tmp_path, make_rows) -> None:
    first = opened()
    (tmp_path / "elsewhere").mkdir()
    for path in (tmp_path / "other.jsonl", tmp_path / "elsewhere" / "rows.jsonl"):
        make_rows(path, ROWS)
        again = opened(path)
        assert difference(first.identity, again.identity) is None
    assert again[1].source(0) == "rows.jsonl:1"
    other = opened(make_rows(tmp_path / "less.jsonl", ROWS[:-1]))
    found = difference(first.identity, other.identity)
    assert found is not None and found.startswith("content of training file 1 was ") and ";" not in found


def test_two_files_in_another_order_are_other_data(opened, tmp_path, make_rows) -> None:
    paths = [make_rows(tmp_path / name, rows) for name, rows in (("a.jsonl", ROWS[:4]), ("b.jsonl", ROWS[4:]))]
    one, other = opened(paths), opened(paths[::-1])
    found = difference(one.identity, other.identity)
    assert found is not None and "training file 1 was" in found and "training file 2 was" in found
    found = difference(one.identity, opened(paths[0]).identity)
    assert found is not None and "training file 2 was" in found and "is nothing" in found


def test_fingerprints_of_earlier_versions_are_compared_by_content(opened) -> None:
    identity = opened().identity
    digest = identity["content of training file 1"]
    rest = {name: value for name, value in identity.items() if name != "content of training file 1"}
    before = {**rest, "content of old name.jsonl": digest, "files": ["old name.jsonl"]}
    assert difference(before, identity) is None
    changed = difference({**before, "content of old name.jsonl": "0" * 64}, identity)
    assert changed is not None and changed.startswith("content of training file 1 was 0000")


def test_input_that_is_gone_is_an_error_of_its_own(opened, tmp_path) -> None:
    opened()
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UserError, match="no such file"):
        opened()
