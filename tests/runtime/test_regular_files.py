"""Search in files of any size: what the whole text contains is found, in bounded memory."""

from __future__ import annotations

import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfprm_jax.runtime import regular_files

TEXT = st.text("aки\n", max_size=12)


@given(content=TEXT, texts=st.lists(TEXT, min_size=1, max_size=3), piece=st.integers(1, 9))
def test_the_same_as_in_the_whole_text(content, texts, piece, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    path.write_text(content, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regular_files, "_PIECE", piece)
        assert regular_files.contains(path, *texts) == all(text in content for text in texts)


def test_memory_is_bounded_and_only_regular_files_are_read(tmp_path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\xff<extra_0>")
    tracemalloc.start()
    assert regular_files.contains(large, "<extra_0>") and not regular_files.contains(large, "<extra_1>")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    os.mkfifo(tmp_path / "pipe")
    assert not any(regular_files.contains(tmp_path / name, "a") for name in ("pipe", "absent", ""))
