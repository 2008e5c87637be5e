"""The process of a command: standard streams whose failure does not end it, and Ctrl-C during imports.

Every command begins with::

    from cfprm_jax.runtime import process

    if __name__ == "__main__":
        process.start()

before its other imports, which take seconds. Only modules that Python has loaded by itself are imported here.

The results of a command are files; standard output has messages about them. So a reader of the messages who leaves
(``train | head -3``), a terminal that is gone or a full disk under ``> log`` does not end a command: its messages go to
the null device from then on, with one line on standard error.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys

_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_ERRORS = "cfprm_jax_shown"
_LAST_WAIT = 1.0  # seconds
_in_command = False


def start() -> None:
    """Prepare the process of a command; call it before anything else. Does nothing in a host such as a notebook."""
    if sys.stdout is not sys.__stdout__:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup ... &
        signal.signal(signal.SIGINT, _interrupted)
    _occupy_closed_descriptors()
    _use_utf8()
    codecs.register_error(_ERRORS, _shown)
    sys.stdout, sys.stderr = _stream(sys.stdout, _STANDARD_OUTPUT), _stream(sys.stderr, _STANDARD_ERROR)


class command:  # noqa: N801 -- a context manager; contextlib is not imported for it
    """The command itself: inside the block Ctrl-C raises KeyboardInterrupt, after it ends the process without a word.

    Does nothing about signals in a process that :func:`start` was not called in.
    """

    def __enter__(self) -> None:
        global _in_command
        _in_command = True
        self._ours = signal.getsignal(signal.SIGINT) is _interrupted
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        global _in_command
        _in_command = False
        if self._ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def write_line(line: str, descriptor: int = _STANDARD_ERROR) -> None:
    """Write a line to standard error from a signal's handler or another thread, past Python's buffers."""
    try:  # noqa: SIM105 -- contextlib is not imported for it
        os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
    except OSError:  # the reader is gone
        pass


def write_last_line(line: str) -> None:
    """As :func:`write_line`, with nothing after it: what other threads print from now on goes to the null device.

    A line that another thread is in the middle of printing comes before, unless its reader has stopped reading.
    """
    import threading

    last = _STANDARD_ERROR
    try:
        last = os.dup(_STANDARD_ERROR)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, _STANDARD_OUTPUT)
        os.dup2(null, _STANDARD_ERROR)
    except OSError:  # no descriptor is left; the line matters more
        pass
    # It waits for the lock of whoever prints. That may be this thread, in a signal's handler.
    waits = threading.Thread(target=sys.stdout.flush, daemon=True)
    waits.start()
    waits.join(_LAST_WAIT)
    write_line(line, last)


def end_by_interrupt(number: int) -> None:
    """End at once if the signal is Ctrl-C: for the time before a command begins, when nothing has been done."""
    if number == signal.SIGINT:
        write_line("stopped by SIGINT before the command began")
        os._exit(130)


def _interrupted(number: int, frame: object) -> None:
    # A KeyboardInterrupt would come out of an import as whatever the module makes of it.
    end_by_interrupt(number)


def _occupy_closed_descriptors() -> None:
    """Open the null device as 0, 1 and 2 where they are closed; the next file would take the number, and messages."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            else:
                os.set_inheritable(descriptor, True)


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode in a locale of another encoding.

    Python does so by itself in the locale C, and from 3.15 on in all. Names of files and what libraries read and write
    are UTF-8 then, as on other systems.
    """
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _shown(error: UnicodeError) -> tuple[bytes, int]:
    """The error handler of a stream's encoding: a file name's own bytes, else an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    out = b""
    for character in error.object[error.start : error.end]:
        code = ord(character)
        out += bytes([code - 0xDC00]) if 0xDC80 <= code <= 0xDCFF else character.encode("ascii", "backslashreplace")
    return out, error.end


class _Messages(io.FileIO):
    """A descriptor that becomes the null device when it cannot be written to any more."""

    def write(self, data, /):
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            # `--help | head` needs no note.
            if self.fileno() == _STANDARD_OUTPUT and (_in_command or error.errno != errno.EPIPE):
                write_line(f"note: standard output: {error.strerror}; the command continues without it")
            return len(data)


def _stream(before: object, descriptor: int) -> io.TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    raw = _Messages(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=_ERRORS, line_buffering=True)
