"""SIGTERM, which clusters send before they take a machine away, SIGHUP of a terminal that is closed, and Ctrl-C.

Python calls a signal's handler when its main thread comes back from what it does, which may be a compilation of
minutes, or a wait of hours for another process. So a thread of its own reads the numbers of signals from a pipe, into
which the interpreter writes them as they come. Event loops borrow that place for theirs; then the handler is heard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopSignal:
    """Whether this process was told to stop.

    Until somebody asks (by calling it), nothing has been done that must be saved, and a signal ends the process, by the
    function given to :meth:`end_with`. From then on the asker acts: the loop, which saves and leaves. A second Ctrl-C
    does not wait for that.

    Attributes:
      received: the first signal, once there was one.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._asked = False
        self._interrupt = False  # a second Ctrl-C that the main thread is to raise
        self._end: Callable[[signal.Signals], Any] | None = None
        self._lock = threading.RLock()
        # How often each signal was written to the pipe, and how often its handler was called: the same ones.
        self._written = dict.fromkeys(_HEARD, 0)
        self._handled = dict.fromkeys(_HEARD, 0)
        self._answered = dict.fromkeys(_HEARD, 0)

    def __call__(self) -> signal.Signals | None:
        """The signal, if there was one; from now on they wait to be asked for."""
        self._asked = True
        return self.received

    def end_with(self, end: Callable[[signal.Signals], Any]) -> None:
        """Have signals end the process by end(signal), which does not return; one that has come already does so now."""
        with self._lock:
            self._end = end
            self.do_not_wait()

    def do_not_wait(self) -> None:
        """Everything is saved: until somebody asks again, signals end the process, one that has come already too."""
        with self._lock:
            self._asked = False
            if self.received is not None:
                if self._end is None:
                    raise KeyboardInterrupt
                self._end(self.received)

    def install(self) -> Callable[[], None]:
        """Hear signals from now on; to be called in the main thread. What it returns puts everything back."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # nohup has SIGHUP ignored, and that is what its user wants.
        hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        wanted = [number for number in _HEARD if number != signal.SIGHUP or not hangup_ignored]
        previous = {number: signal.signal(number, self._handle) for number in wanted}
        file_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals").start()

        def restore() -> None:
            signal.set_wakeup_fd(file_before)
            for number, handler in previous.items():
                # None stands for one that was not set from Python, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.close(writer)  # which ends the thread

        return restore

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Hear signals inside the with block, and after it as before."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            yield self
            return
        restore = self.install()
        try:
            yield self
        finally:
            restore()

    def _listen(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in self._written:
                    with self._lock:
                        self._written[signal.Signals(number)] += 1
                        self._answer(signal.Signals(number))
        os.close(reader)

    def _handle(self, number: int, frame: Any) -> None:
        # The thread that has the lock may wait for what this one holds, such as the standard output.
        if self._lock.acquire(blocking=self._end is None):
            try:
                self._handled[signal.Signals(number)] += 1
                self._answer(signal.Signals(number))
            finally:
                self._lock.release()
        if self._interrupt:
            self._interrupt = False
            raise KeyboardInterrupt

    def _answer(self, number: signal.Signals) -> None:
        count = max(self._written[number], self._handled[number])
        if count == self._answered[number]:
            return
        self._answered[number] = count
        again = self.received == number == signal.SIGINT
        self.received = self.received or number
        if self._end is None:
            self._interrupt = self._interrupt or again
        elif again or not self._asked:
            self._end(number)
