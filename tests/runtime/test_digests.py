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
