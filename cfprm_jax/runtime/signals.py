"""SIGTERM, which clusters send before they take a machine away, SIGHUP of a terminal that is closed, and Ctrl-C.

Python calls a signal's handler when its main thread comes back from what it does, which may be a compilation of
minutes, or a wait of hours for another process. So a thread of its own reads the numbers of signals from a pipe, into
which the interpreter writes them as they arrive. While an event loop has the wakeup descriptor, the handler acts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class StopSignal:
    """Whether this process has received a signal to stop.

    Before the first call of the object there is nothing to save, and a signal ends the process by the function given
    to :meth:`end_with`. After it the caller, the training loop, polls the object, saves and returns. A second Ctrl-C
    ends the process at once.

    Attributes:
      received: the first signal received, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._polled = False
        self._interrupt = False  # a second Ctrl-C, which the main thread must raise
        self._end: Callable[[signal.Signals], Any] | None = None
        self._lock = threading.RLock()
        # How often each signal was written to the pipe, and how often its handler was called: the same ones.
        self._written = dict.fromkeys(_SIGNALS, 0)
        self._handled = dict.fromkeys(_SIGNALS, 0)
        self._answered = dict.fromkeys(_SIGNALS, 0)

    def __call__(self) -> signal.Signals | None:
        """The signal received, or None; from now on signals wait for the next call."""
        self._polled = True
        return self.received

    def end_with(self, end: Callable[[signal.Signals], Any]) -> None:
        """Let signals end the process by end(signal), which does not return; a pending signal does so now."""
        with self._lock:
            self._end = end
            self.do_not_wait()

    def do_not_wait(self) -> None:
        """Everything is saved: until the next call, signals end the process; a pending signal does so now."""
        with self._lock:
            self._polled = False
            if self.received is not None:
                if self._end is None:
                    raise KeyboardInterrupt
                self._end(self.received)

    def install(self) -> Callable[[], None]:
        """Install the handlers; call it in the main thread. Returns a function that restores the previous ones."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # nohup ignores SIGHUP on purpose.
        hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        handled = [number for number in _SIGNALS if number != signal.SIGHUP or not hangup_ignored]
        previous = {number: signal.signal(number, self._handle) for number in handled}
        file_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="signals").start()

        def restore() -> None:
            signal.set_wakeup_fd(file_before)
            for number, handler in previous.items():
                # None: the handler was not set from Python and cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.close(writer)  # which ends the thread

        return restore

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignal]:
        """Handle signals inside the with block; afterwards the previous handlers apply again."""
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
        elif again or not self._polled:
            self._end(number)
