"""Comparisons in processes of their own: verdicts, the limit of time, and what comes after it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.grading import processes
from cfprm_jax.grading.processes import Comparer, Stopped

ENDLESS = "9^{9^{9^{9}}}"


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def comparer():
    made = Comparer("math_verify", 0.5)
    yield made
    made.close()
    assert all(not worker.alive and gone(worker._process.pid) for worker in made._workers)


def test_an_expression_that_never_ends_is_stopped_and_counted_and_the_next_pair_is_compared(comparer):
    comparer._patience = 120  # by the clock: the limit of processor time has to be enough
    assert comparer.equal("1/2", "0.5") is True and comparer.equal("1/2", "0.6") is False
    started = time.monotonic()
    assert comparer.equal(ENDLESS, "x+1") is None
    assert time.monotonic() - started < 30  # rather than never
    assert comparer.equal("0.25", "1/4") is True
    assert comparer.stopped == [Stopped(ENDLESS, "x+1", "time limit")]
    assert len(comparer._workers) == 2


def test_what_waits_without_computing_is_stopped_by_the_clock(comparer):
    assert comparer.equal("1/2", "2") is False
    worker = comparer._workers[0]
    os.kill(worker._process.pid, signal.SIGSTOP)  # it uses no processor time from here on
    assert comparer.equal("1/3", "2/3") is None and gone(worker._process.pid)
    comparer._patience = 30
    assert comparer.equal("2/6", "1/3") is True


def test_the_strict_rules_have_processes_too():
    comparer = Comparer("prm800k", 5)
    try:
        assert comparer.equal("2/4", "1/2") is False and comparer.equal("x+x", "2x") is True
        assert comparer.stopped == []
    finally:
        comparer.close()


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(processes, "_COMMAND", "raise SystemExit('no sympy here')")
    with pytest.raises(UserError, match="--grader=prm800k: its process does not start: no sympy here"):
        Comparer("prm800k", 5).equal("x+x", "2x")


def test_nothing_starts_after_the_end(comparer):
    assert comparer.equal("x+x", "2x") is True
    comparer.close()
    with pytest.raises(RuntimeError, match="closed"):
        comparer.equal("x+x", "3x")
    assert len(comparer._workers) == 1
