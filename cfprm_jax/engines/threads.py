"""Threads for requests, which nothing waits for: a reply may take minutes, and Ctrl-C is to end the command at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any


class RequestThreads:
    """Runs work in at most `number` threads, in its order.

    A ThreadPoolExecutor's are waited for where it is closed, and again where the interpreter ends.
    """

    def __init__(self, number: int) -> None:
        self._number, self._started = number, 0
        self._jobs: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()

    def submit(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """The future of what work gives."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._jobs.put((future, work))
        if self._started < self._number:
            self._started += 1
            threading.Thread(target=self._run, name="request", daemon=True).start()
        return future

    def close(self) -> None:
        """Cancel what has not begun; the threads end with what they are doing."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        for _ in range(self._started):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
