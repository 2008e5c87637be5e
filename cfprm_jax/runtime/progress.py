"""Progress of a command: one line that is redrawn on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

# Seconds between reports: on a terminal, where the line is redrawn, and elsewhere.
_TERMINAL, _PLAIN = 0.1, 10.0
_ERASE = "\r\x1b[2K"


class ProgressLine:
    """A line about work in progress: its label, how far it is, and the time left."""

    def __init__(self, label: str = "", stream: TextIO | None = None, clock: Callable[[], float] | None = None) -> None:
        """Start the clock.

        Args:
          label: first word of the line.
          stream: where it is written; standard output by default.
          clock: seconds.
        """
        self._label = f"{label:<12}" if label else ""
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock or time.monotonic
        self._terminal = self._stream.isatty()
        self._started = self._shown = self._clock()
        self._drawn = False

    @property
    def elapsed(self) -> float:
        """Seconds since the start, never 0."""
        return max(self._clock() - self._started, 1e-9)

    def show(self, text: Callable[[], str], fraction: float | None = None, due: bool | None = None) -> None:
        """Write the line, unless that was done a moment ago.

        Args:
          text: called if the line is written.
          fraction: share of the work that is done, if known; the time left is extrapolated from it.
          due: whether a stream that is no terminal gets the line; by default, every ten seconds.
        """
        now = self._clock()
        if self._terminal:
            due = due or now - self._shown >= _TERMINAL
        elif due is None:
            due = now - self._shown >= _PLAIN
        if not due:
            return
        self._shown = now
        line = f"{self._label}{text()}"
        if fraction is not None:
            left = duration(self.elapsed * (1 / fraction - 1)) if fraction else "?"
            line = f"{line}, left {left}"
        if self._terminal:
            self._drawn = True
            self._write(_ERASE + line[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(f"{line}\n")

    def log(self, text: str) -> None:
        """Write a line above the one that is redrawn."""
        self._write(f"{_ERASE if self._terminal else ''}{text}\n")

    def end(self, text: str) -> None:
        """Write the last line, with the label; it stays."""
        self.log(f"{self._label}{text}")
        self._drawn = False

    def clear(self) -> None:
        """Erase the line from a terminal, for what is printed next."""
        if self._drawn:
            self._write(_ERASE)
            self._drawn = False

    def leave(self) -> None:
        """Leave the line on a terminal as it is and go to the next."""
        if self._drawn:
            self._write("\n")
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def counted(number: int, noun: str) -> str:
    """A number of things: "1 step", "2,304 steps", "0 trajectories"."""
    if number != 1:
        noun = re.sub("([^aeiou])y$", r"\1ie", noun)
        noun += "es" if noun.endswith(("ch", "x")) else "s"
    return f"{number:,} {noun}"


def duration(seconds: float) -> str:
    """3725 -> "1:02:05", 65 -> "1:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
