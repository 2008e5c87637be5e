"""Digests: values that files on users' disks hold, so that they never change."""

from __future__ import annotations

import hashlib
import os

from cfprm_jax.runtime import digests


def test_values(tmp_path) -> None:
    assert digests.of_text("abc") == digests.of_parts([b"a", b"bc"]) == hashlib.sha256(b"abc").hexdigest()
    assert digests.of_json({"b": 1, "a": "é"}) == digests.of_text('{"a": "\\u00e9", "b": 1}')
    assert digests.raw("abc").hex() == digests.of_text("abc")
    (tmp_path / "a").write_bytes(b"abc")
    assert digests.of_file(tmp_path / "a") == digests.of_text("abc")
    assert digests.of_paths([tmp_path / "a"]) == digests.of_text("\n3\nabc")
    assert digests.of_paths([tmp_path]) == digests.of_text("a\n3\nabc")


def test_every_byte_of_a_large_file_counts(tmp_path) -> None:
    path = tmp_path / "large"
    raw = bytearray(5_000_000)
    path.write_bytes(raw)
    seen = {digests.of_paths([path])}
    for place in (0, 300, 2_500_001, len(raw) - 1):
        changed = raw.copy()
        changed[place] = 1
        path.write_bytes(changed)
        seen.add(digests.of_paths([path]))
    assert len(seen) == 5


def test_a_span_is_read_again_after_the_file_has_changed(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    assert digests.of_span(path, 1, 3) == digests.of_span(path, 1, 3) == digests.of_text("bcd")
    path.write_bytes(b"abXdef")
    os.utime(path, ns=(0, 0))
    assert digests.of_span(path, 1, 3) == digests.of_text("bXd")
    assert digests.of_span(path, 4, 99) == digests.of_text("ef")


def test_what_a_download_notes_beside_the_files_does_not_count(tmp_path) -> None:
    """hf download --local-dir keeps the time of the download in .cache, so that two downloads would be two models."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"abc")
    alone = digests.of_paths([tmp_path])
    for folder in (".cache/huggingface/download", ".git"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json.metadata").write_text("1764480000.25")
        assert digests.of_paths([tmp_path]) == alone == digests.of_text("sub/a\n3\nabc")
    # Only in the folder itself, whatever the folder's own path is; other hidden files count.
    assert digests.of_paths([tmp_path / ".git"]) == digests.of_text("config.json.metadata\n13\n1764480000.25")
    (tmp_path / ".other").write_bytes(b"")
    assert digests.of_paths([tmp_path]) != alone
