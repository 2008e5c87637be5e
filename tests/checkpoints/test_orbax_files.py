"""Errors of Orbax's threads after a failed save are suppressed; all others are reported."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import types

import pytest

from cfprm_jax.checkpoints import orbax_files


@pytest.fixture
def quiet(monkeypatch):
    """quiet_orbax as it acts in a process of its own, undone afterwards."""
    for name in ("absl", "asyncio", "concurrent.futures"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    return orbax_files.quiet_orbax


def one_writer_fails_and_another_ends_later() -> None:
    """As in a save: the loop is closed when the first one raises, and the other's thread then reports to it."""
    loop, released = asyncio.new_event_loop(), threading.Event()

    async def save() -> None:
        late = asyncio.ensure_future(asyncio.to_thread(released.wait))
        await asyncio.sleep(0)
        assert not late.done()
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        loop.run_until_complete(save())
    threads = loop._default_executor  # type: ignore[attr-defined]
    loop.close()
    released.set()
    threads.shutdown(wait=True)
    gc.collect()


def test_late_writers(quiet, caplog) -> None:
    one_writer_fails_and_another_ends_later()
    assert caplog.text != ""
    caplog.clear()
    quiet()
    one_writer_fails_and_another_ends_later()
    assert caplog.text == ""


def test_threads_and_collected_objects(quiet, capfd) -> None:
    def raised(text: str) -> None:
        error = RuntimeError(text)
        sys.unraisablehook(
            types.SimpleNamespace(exc_type=RuntimeError, exc_value=error, exc_traceback=None, err_msg=None, object=None)
        )

        def fail() -> None:
            raise error

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    quiet()
    raised("Event loop is closed")
    assert capfd.readouterr().err == ""


def test_other_errors_are_reported(quiet, caplog) -> None:
    quiet()
    for name in ("asyncio", "concurrent.futures"):
        try:
            raise RuntimeError("something else")
        except RuntimeError:
            logging.getLogger(name).exception("of %s", name)
        assert f"of {name}" in caplog.text
        try:
            raise RuntimeError("Event loop is closed")
        except RuntimeError:
            logging.getLogger(name).exception("late")
        assert "late" not in caplog.text
