"""The progress line of a command."""

from __future__ import annotations

import io

import pytest

from cfprm_jax.runtime import progress


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "trajectory", "1 trajectory"),
        (0, "trajectory", "0 trajectories"),
        (2304, "step", "2,304 steps"),
        (2, "batch", "2 batches"),
        (2, "prefix", "2 prefixes"),
        (3, "survey", "3 surveys"),
    ],
)
def test_a_number_of_things(number, noun, text):
    assert progress.counted(number, noun) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_rare_and_plain_off_a_terminal(clock):
    stream = io.StringIO()
    line = progress.ProgressLine(stream=stream)
    for clock[0] in (101, 111, 112, 122):
        line.show(lambda: f"at {clock[0]}")
    line.clear()
    line.end("done")
    assert stream.getvalue() == "at 111\nat 122\ndone\n"
    assert line.elapsed == 22


def test_a_terminal_gets_one_line_that_renews_itself(clock):
    stream = Terminal()
    line = progress.ProgressLine(stream=stream)
    for clock[0] in (100.05, 100.3, 100.35, 100.6):
        line.show(lambda: f"at {clock[0]}")
    line.clear()
    line.end("done")
    assert stream.getvalue() == "\r\x1b[2Kat 100.3\r\x1b[2Kat 100.6\r\x1b[2K\r\x1b[2Kdone\n"
