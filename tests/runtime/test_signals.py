"""Signals: received while the main thread is in C, handled by the state of the run, and restored."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from tiny_runs import ROOT

from cfprm_jax.runtime.signals import StopSignal


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the thread receives it, too


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before[1])
    stop = StopSignal()
    with stop.installed(), stop.installed() as inner:
        assert inner() is None
        send(signal.SIGTERM)
    assert stop() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before[0]
    assert signal.set_wakeup_fd(before[1]) == before[1]


def test_the_first_signal_counts_and_a_second_interrupt_does_not_wait() -> None:
    with StopSignal().installed() as stop:
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert stop() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with StopSignal().installed() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop() == signal.SIGTERM


def test_before_the_first_poll_a_signal_ends_the_process() -> None:
    """Once each, in whichever thread comes first; after a poll signals wait for the next one, until all is saved."""
    ended: list[signal.Signals] = []
    with StopSignal().installed() as stop:
        stop.end_with(ended.append)
        send(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
        assert stop() == signal.SIGTERM
        send(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
        stop.do_not_wait()
        assert ended == [signal.SIGTERM] * 2


def test_one_that_came_before_anybody_could_end_the_process() -> None:
    ended: list[signal.Signals] = []
    with StopSignal().installed() as stop:
        send(signal.SIGTERM)
        stop.end_with(ended.append)
    assert ended == [signal.SIGTERM]


def test_signals_reach_no_other_process() -> None:
    with StopSignal().installed() as stop:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.do_not_wait()


def test_the_handler_acts_while_an_event_loop_has_the_pipe() -> None:
    ended: list[signal.Signals] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with StopSignal().installed() as stop:
        stop.end_with(ended.append)
        own = signal.set_wakeup_fd(writer)
        send(signal.SIGTERM)
        signal.set_wakeup_fd(own)
        assert ended == [signal.SIGTERM]
    for file in (reader, writer):
        os.close(file)


BUSY = """
import hashlib, os
from cfprm_jax.runtime.signals import StopSignal

stop = StopSignal()
stop.install()
stop.end_with(lambda number: (os.write(1, f"ended by {number.name}\\n".encode()), os._exit(7)))
print("busy", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)  # a minute in C that no signal interrupts, as of a compiler
"""


def test_a_signal_acts_while_the_main_thread_is_busy() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    with contextlib.closing(process.stdout) as output:
        assert output.readline() == b"busy\n"
        process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
        assert output.read() == b"ended by SIGTERM\n"
    assert process.wait() == 7
    assert time.monotonic() - begin < 20


PRINTING = """
import threading
from cfprm_jax.runtime import process
process.start()
from cfprm_jax.runtime.distributed import Processes
from cfprm_jax.runtime.signals import StopSignal

stop = StopSignal()
stop.install()
stop.end_with(lambda number: Processes().stop(f"stopped by {number.name}", 7))

def go():
    while True:
        print("x" * 4095)  # with its end a page, so that a pipe becomes full

for _ in range(8):
    threading.Thread(target=go, daemon=True).start()
go()
"""


@pytest.mark.parametrize("read", [True, False])
def test_nothing_follows_the_last_line(read: bool) -> None:
    """Of a process whose threads print all the time, to a reader, or to one that has stopped reading."""
    lines, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTING],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=theirs,
        stderr=theirs if read else subprocess.PIPE,
    )
    os.close(theirs)
    with os.fdopen(lines, "rb") as output:
        full = fcntl.fcntl(lines, fcntl.F_GETPIPE_SZ)
        waiting = np.zeros(1, np.int32)
        while waiting[0] < full:
            fcntl.ioctl(lines, termios.FIONREAD, waiting)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        if read:
            assert output.read().splitlines()[-1] == b"stopped by SIGTERM"
        assert process.wait(timeout=60) == 7
    if not read:
        with process.stderr:
            assert process.stderr.read() == b"stopped by SIGTERM\n"
