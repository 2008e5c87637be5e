"""metrics.jsonl as it is read back, and the progress line on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
import pathlib

import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.run.metrics import EVALUATION, MetricLog, NullWriter, Progress, truncate
from cfprm_jax.runtime.progress import duration

VALUES = {"granularity": 2, "loss": 0.51234, "step_accuracy": 0.75, "learning_rate": 1.5e-6}


def test_log_and_resume(tmp_path) -> None:
    """After a resume from step 2 every step is there once, a half-written line is gone, NaN is null."""
    log = MetricLog(tmp_path, 0)
    for step in range(1, 5):
        log.write(step, {"loss": 1.0 / step, "nothing": float("nan")}, board="train")
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    log = MetricLog(tmp_path, 2)
    log.write(3, {"loss": 30.0}, board="train")
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1] == {"step": 2, "loss": 0.5, "nothing": None}
    assert rows[2]["loss"] == 30.0


def test_an_evaluation_that_is_to_come_again_goes(tmp_path) -> None:
    """That of the resumed step, not those before it, and not the step itself."""
    log = MetricLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5})
        log.write(step, {"loss": 0.25}, prefix=EVALUATION)
    log.close()
    MetricLog(tmp_path, 2).close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": s, name: v} for s in (1, 2) for name, v in (("loss", 0.5), ("eval_loss", 0.25))]
    MetricLog(tmp_path, 2, evaluated=False).close()
    again = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert again == rows[:-1]


def test_lines_that_are_none_of_a_step_go(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 0.5}\n'
    path.write_bytes(b'[1]\n{"loss": 0.5}\n{"step": "1"}\nnull\n\xff\n\x00\x00\n' + good + b'{"step": null}\n')
    assert truncate(path, 3) == 7
    assert path.read_bytes() == good


def test_truncate_of_nothing(tmp_path) -> None:
    assert truncate(tmp_path / "metrics.jsonl", 3) == 0


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_an_error(tmp_path) -> None:
    log = MetricLog(tmp_path, 0)
    log._file = open("/dev/full", "a")  # noqa: SIM115, PTH123
    with pytest.raises(UserError, match=f"cannot write metrics into {tmp_path}: No space left on device"):
        log.write(1, {"loss": 1.0}, board="train")
    log.close()


def test_a_null_writer_writes_nothing(tmp_path) -> None:
    NullWriter().write(1, {"loss": 1.0}, board="train")
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(stream: io.StringIO, steps: int, seconds: float) -> Progress:
    clock = Clock()
    progress = Progress(stream, 0, 40, log_every=10, clock=clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        progress.show(step, {**VALUES, **progress.advance(step, 1000, 12000)})
    return progress


def test_plain_lines() -> None:
    stream = io.StringIO()
    drive(stream, 25, seconds=2.0).log("a note")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 10/40  C=2  loss 0.5123  accuracy 0.750  rate 1.50e-06  500 tokens/s (expanded 6,000)  left 1:00",
        "step 20/40  C=2  loss 0.5123  accuracy 0.750  rate 1.50e-06  500 tokens/s (expanded 6,000)  left 0:40",
        "a note",
    ]


def test_mfu_is_of_all_devices(tmp_path) -> None:
    """Two steps of 3e12 FLOPs in a second each, on devices that can do 12e12 together."""
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, 0, 40, log_every=1, clock=clock, peak_flops=12e12)
    for step in (1, 2):
        clock.now += 1.0
        rates = progress.advance(step, 1000, 12000, 3e12)
    assert rates["model_flops_per_second"] == pytest.approx(3e12)
    assert rates["mfu"] == pytest.approx(0.25)
    progress.show(2, {**VALUES, **rates})
    assert "MFU 25.0%  left" in stream.getvalue()
    unknown = Progress(stream, 0, 40, log_every=1, clock=clock).advance(1, 1, 1, 1e12)
    assert unknown["mfu"] is None


def test_one_updating_line_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    progress = drive(stream, 25, seconds=0.01)  # 10 updates a second at most
    progress.log("a note")
    progress.finish()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert 3 <= text.count("\r") <= 7
    assert all(len(part) <= 60 + len("\x1b[2K") for part in text.split("\r"))
    assert "\r\x1b[2Ka note\n" in text


def test_duration() -> None:
    assert [duration(x) for x in (0.4, 65, 3725)] == ["0:00", "1:05", "1:02:05"]
