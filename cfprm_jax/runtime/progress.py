"""How far a command is: one line that renews itself on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

# Seconds between reports: on a terminal, where the line is rewritten, and elsewhere.
_TERMINAL, _PLAIN = 0.2, 10.0


class ProgressLine:
    """A line about work in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._started = self._shown = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start, never 0."""
        return max(time.monotonic() - self._started, 1e-9)

    def show(self, line: Callable[[], str]) -> None:
        """Write the line that is asked for, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._shown >= (_TERMINAL if self._terminal else _PLAIN):
            self._shown = now
            self._write(line(), end="" if self._terminal else "\n")

    def end(self, line: str) -> None:
        """Write the last line, which stays."""
        self._write(line, end="\n")

    def clear(self) -> None:
        """Leave nothing of the line on a terminal, for what is printed next."""
        if self._terminal:
            self._write("", end="")

    def _write(self, line: str, end: str) -> None:
        self._stream.write(f"\r\x1b[2K{line}{end}" if self._terminal else f"{line}{end}")
        self._stream.flush()
