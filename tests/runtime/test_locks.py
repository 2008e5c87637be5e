"""Locks: one holder, and none on a file that has lost its name."""

from __future__ import annotations

import threading

from cfprm_jax.runtime import locks


def test_one_holder(tmp_path) -> None:
    path = tmp_path / "lock"
    with locks.held(path) as first, locks.held(path) as second:
        assert first and not second
    with locks.held(path, remove=True) as again:
        assert again
    assert not path.exists()
    with locks.held(path) as first, locks.held(path, remove=True) as second:
        assert first and not second
    assert path.exists()  # whoever has not got it does not delete it


def test_waiting_ends_with_the_holder(tmp_path) -> None:
    path, order, held = tmp_path / "lock", [], threading.Event()

    def hold() -> None:
        with locks.held(path, wait=True, remove=True):
            held.set()
            order.append("first")
            threading.Event().wait(0.1)
            order.append("first ends")

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    # The file that this one opened is deleted while it waits: it locks the next one of that name.
    with locks.opened(path, wait=True) as file:
        order.append("second")
        assert file is not None
        with locks.held(path) as third:
            assert not third
    thread.join()
    assert order == ["first", "first ends", "second"]


def test_a_file_that_was_renamed_is_not_taken_for_its_name(tmp_path) -> None:
    path = tmp_path / "rows"
    with locks.opened(path, "a+b") as file:
        assert file is not None
        path.rename(tmp_path / "other")
        with locks.opened(path, "a+b") as fresh:
            assert fresh is not None and path.exists()
