"""The order of things in the loop: saves, evaluations, signals, losses that are not finite."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from cfprm_jax.config import RunConfig
from cfprm_jax.data.loader import Batch
from cfprm_jax.errors import UserError
from cfprm_jax.training import checkpoint, loop
from cfprm_jax.training.metrics import MetricLog, Progress

EVALUATION = {
    "loss": 0.5,
    "step_accuracy": 0.9,
    "negative_f1": 0.8,
    "negative_precision": 0.7,
    "negative_recall": 0.6,
    "auroc": 0.95,
    "positives": 10.0,
    "negatives": 3.0,
}


class Batches:
    """Batch k by number, poisoned at one step; calls back before each."""

    def __init__(self, batch, poisoned: int = -1, before=lambda k: None):
        self.next, self._batch, self._poisoned, self._before = 0, batch, poisoned, before

    def __next__(self) -> Batch:
        self._before(self.next)
        packed = self._batch(seed=self.next)
        self.next += 1
        if self.next == self._poisoned:
            packed.labels[0, 0] = np.inf
        sources = tuple(f"corpus.jsonl:{self.next * 10 + i % 8}" for i in range(16))
        return Batch(packed, 2, 0, 1, sources, 16, tokens_expanded=256, tokens_computed=128)

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}


@pytest.fixture
def drive(setup, batch, tmp_path):
    """Run the loop in tmp_path; returns (outcome, rows of metrics.jsonl, steps saved, text shown)."""

    def run(batches: Batches, start: int = 0, state=None, evaluate=lambda params, stop: None, stop=None, **options):
        s = setup(num_steps=6)
        stream = io.StringIO()
        job = loop.Job(
            train_step=s.step,
            evaluate=evaluate,
            shardings=s.batch_shardings,
            num_steps=6,
            config=RunConfig(**{"checkpoint_every": 2, "log_every": 2, **options}),
            meta={"fingerprint": {}},
        )
        with contextlib.ExitStack() as stack:
            checkpoints = stack.enter_context(contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=9)))
            log = stack.enter_context(contextlib.closing(MetricLog(tmp_path, start)))
            progress = Progress(stream, start, 6, 2)
            state = s.init() if state is None else state
            outcome = loop.train(job, state, start, batches, checkpoints, log, progress, stop or (lambda: False))
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        saved = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
        return outcome, rows, saved, stream.getvalue()

    return run


def test_runs_to_the_end(drive, batch) -> None:
    seen = []

    def evaluate(params, stop):
        seen.append(jax.tree.map(np.asarray, params))
        return EVALUATION

    outcome, rows, saved, text = drive(Batches(batch), evaluate=evaluate, eval_every=3)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert saved == [2, 4, 6]
    assert (outcome.step, outcome.stopped, outcome.evaluation) == (6, False, EVALUATION)
    jax.tree.map(np.testing.assert_array_equal, seen[-1], outcome.state.params)
    assert text.count("held-out loss 0.5000") == 2
    assert "step 6/6  C=2" in text
    assert rows[0]["stage"] == 1
    assert rows[0]["tokens_expanded"] == 256


def test_stops_and_goes_on_to_the_same_end(drive, batch, setup, tmp_path) -> None:
    """SIGTERM during step 3 saves step 3; from there the rest gives what an undisturbed run gives, bit for bit."""
    expected, whole_rows, _, _ = drive(Batches(batch))
    kept = jax.tree.map(np.asarray, expected.state)
    shutil.rmtree(tmp_path)
    with loop.StopSignal().installed() as stop:
        kill = Batches(batch, before=lambda k: os.kill(os.getpid(), signal.SIGTERM) if k == 2 else None)
        outcome, _, saved, _ = drive(kill, stop=stop, checkpoint_every=100)
    assert (outcome.step, outcome.stopped) == (3, True)
    assert 3 in saved
    s = setup(num_steps=6)
    with contextlib.closing(checkpoint.Checkpoints(tmp_path, keep=9)) as checkpoints:
        shapes = jax.tree.map(lambda x, h: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h), kept, s.shardings)
        restored = checkpoints.restore(3, shapes)
    rest = Batches(batch)
    rest.next = restored.data["next"]
    outcome, rows, _, _ = drive(rest, start=3, state=restored.state, checkpoint_every=100)
    jax.tree.map(np.testing.assert_array_equal, outcome.state, kept)
    timing = ("steps_per_second", "tokens_per_second", "expanded_tokens_per_second")
    for row in rows + whole_rows:
        for name in timing:
            del row[name]
    assert rows == whole_rows


def test_a_stop_ends_an_evaluation(drive, batch) -> None:
    stop = loop.StopSignal()

    def evaluate(params, asked):
        stop.received = True
        assert asked()

    outcome, rows, saved, _ = drive(Batches(batch), evaluate=evaluate, eval_every=3, stop=stop)
    assert outcome.stopped
    assert saved == [2, 3]
    assert len(rows) == 3


def test_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with loop.StopSignal().installed() as stop:
        assert not stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_loss_that_is_not_finite(drive, batch, tmp_path) -> None:
    """Named are step, quantity, sources and the last good checkpoint; no state after it is saved."""
    with pytest.raises(UserError) as error:
        drive(Batches(batch, poisoned=4))
    text = str(error.value)
    assert text.startswith("step 4: loss is ")
    assert "corpus.jsonl:40, corpus.jsonl:41, corpus.jsonl:42, corpus.jsonl:43, corpus.jsonl:44 and 3 more" in text
    assert text.endswith(f"last good checkpoint: {tmp_path / 'checkpoints' / '2'}")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2"]


def test_not_finite_before_any_checkpoint(drive, batch) -> None:
    with pytest.raises(UserError, match=r"step 1: .*last good checkpoint: none was written yet"):
        drive(Batches(batch, poisoned=1))


def test_job_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        loop.Job(None, None, None, 1, RunConfig(), {}).num_steps = 2  # type: ignore[misc, arg-type]
