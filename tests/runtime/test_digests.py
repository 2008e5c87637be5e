"""Digests: values that files on users' disks hold, so that they never change."""

from __future__ import annotations

import hashlib

from cfprm_jax.runtime import digests


def test_values(tmp_path) -> None:
    assert digests.of_text("abc") == digests.of_parts([b"a", b"bc"]) == hashlib.sha256(b"abc").hexdigest()
    assert digests.of_json({"b": 1, "a": "é"}) == digests.of_text('{"a": "\\u00e9", "b": 1}')
    assert digests.raw("abc").hex() == digests.of_text("abc")
    (tmp_path / "a").write_bytes(b"abc")
    assert digests.of_file(tmp_path / "a") == digests.of_text("abc")
    assert digests.of_paths([tmp_path / "a"], whole=True) == digests.of_text("\n3\nabc")
    assert digests.of_paths([tmp_path], whole=True) == digests.of_text("a\n3\nabc")


def test_a_large_file_is_sampled(tmp_path) -> None:
    path = tmp_path / "large"
    raw = bytearray(64 * 4096 + 100)
    path.write_bytes(raw)
    sampled, whole = (digests.of_paths([path], whole=w) for w in (False, True))
    raw[-1] = 1
    path.write_bytes(raw)
    assert digests.of_paths([path], whole=False) != sampled and digests.of_paths([path], whole=True) != whole
