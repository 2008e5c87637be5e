"""The order of things in the loop: saves, evaluations, signals, losses that are not finite."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from cfprm_jax.checkpoints import saving
from cfprm_jax.config import RunConfig
from cfprm_jax.config.shared import EVAL_METRICS
from cfprm_jax.data.loader import Batch
from cfprm_jax.errors import UserError
from cfprm_jax.run import loop
from cfprm_jax.run.metrics import MEASURED, MetricLog, Progress
from cfprm_jax.runtime.distributed import StopVote
from cfprm_jax.runtime.signals import StopSignal

pytestmark = pytest.mark.quick_compile

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


def shapes(s):
    return jax.tree.map(lambda x, h: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h), s.init(), s.shardings)


@pytest.fixture
def drive(setup, batch, tmp_path):
    """Run the loop in tmp_path, anew or from the newest checkpoint as train does.

    Returns (result, rows of metrics.jsonl, steps saved, text shown).
    """

    def run(batches, evaluate=None, stop=lambda: False, resume=False, **options):
        s = setup(num_steps=6)
        stream = io.StringIO()
        plan = loop.TrainingPlan(
            train_step=s.step,
            evaluate=evaluate,
            shardings=s.batch_shardings,
            num_steps=6,
            config=RunConfig(**{"checkpoint_every": 2, "log_every": 2, "keep_checkpoints": 9, **options}),
            meta={"fingerprint": {}},
            flops=lambda batch: 1e9,
            measure=lambda: {"memory_in_use": None},
        )
        with contextlib.ExitStack() as stack:
            opened = saving.Checkpoints(tmp_path, plan.config.keep_checkpoints, plan.config.keep_best)
            checkpoints = stack.enter_context(contextlib.closing(opened))
            start = loop.Position(s.init())
            if resume:
                restored = checkpoints.restore_newest(shapes(s))
                start = loop.Position(restored.state, restored.step, restored.meta["metrics"] is not None)
                batches.next = restored.data["next"]
            metrics = stack.enter_context(contextlib.closing(MetricLog(tmp_path, start.step, start.evaluated)))
            writers = loop.Writers(checkpoints, metrics, Progress(stream, start.step, 6, 2))
            result = loop.train(plan, start, batches, writers, stop)
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        saved = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
        return result, rows, saved, stream.getvalue()

    return run


@pytest.fixture
def restore(setup, tmp_path):
    """The newest checkpoint in tmp_path."""

    def newest():
        with contextlib.closing(saving.Checkpoints(tmp_path, keep=9)) as checkpoints:
            return checkpoints.restore_newest(shapes(setup(num_steps=6)))

    return newest


def test_runs_to_the_end(drive, batch, restore) -> None:
    seen = []

    def evaluate(params, stop):
        seen.append(jax.tree.map(np.asarray, params))
        return EVALUATION

    result, rows, saved, text = drive(Batches(batch), evaluate=evaluate, eval_every=3)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert saved == [2, 4, 6]
    assert result == (6, True)
    newest = restore()
    assert newest.meta["metrics"] == EVALUATION
    jax.tree.map(np.testing.assert_array_equal, seen[-1], newest.state.params)
    assert text.count("held-out loss 0.5000") == 2
    assert "step 6/6  C=2" in text
    assert rows[0]["stage"] == 1
    assert rows[0]["tokens_expanded"] == 256
    assert rows[0]["model_flops_per_second"] > 0
    assert rows[0]["mfu"] is rows[0]["memory_in_use"] is None


def test_stops_and_resumes_to_the_same_end(drive, batch, restore, tmp_path) -> None:
    """SIGTERM during step 3 saves step 3; from there the rest gives what an undisturbed run gives, bit for bit."""
    _, whole_rows, _, _ = drive(Batches(batch))
    expected = jax.tree.map(np.asarray, restore().state)
    shutil.rmtree(tmp_path)
    with StopSignal().installed() as received:
        kill = Batches(batch, before=lambda k: os.kill(os.getpid(), signal.SIGTERM) if k == 2 else None)
        result, _, saved, _ = drive(kill, stop=StopVote(received, jax.devices()[:1], 1), checkpoint_every=100)
    assert result == (3, False)
    assert 3 in saved
    result, rows, _, _ = drive(Batches(batch), resume=True, checkpoint_every=100)
    assert result == (6, True)
    jax.tree.map(np.testing.assert_array_equal, restore().state, expected)
    for row in rows + whole_rows:
        for name in MEASURED:
            row.pop(name, None)
    assert rows == whole_rows


@pytest.mark.parametrize("at", [3, 6])
def test_an_evaluation_that_a_stop_ends_is_made_up(drive, batch, restore, tmp_path, at: int) -> None:
    """At the last step too; cut again it comes again; whole it is in the checkpoint, and counts as the best."""
    stop = StopSignal()

    def cut(params, stopped):
        if (tmp_path / "metrics.jsonl").read_text().count('"loss"') < at:
            return EVALUATION
        stop.received = signal.SIGTERM
        assert stopped()
        return None

    def resume(evaluate, stopping):
        return drive(Batches(batch), evaluate, stopping, resume=True, **options)

    options = {"eval_every": 3, "keep_best": "auroc"}
    vote = StopVote(stop, jax.devices()[:1], 1)
    result, rows, saved, _ = drive(Batches(batch), evaluate=cut, stop=vote, **options)
    assert result == (at, False)
    assert at in saved and restore().meta["metrics"] is None
    assert [row["step"] for row in rows if "eval_loss" in row] == [3][: at // 6]
    result, _, _, _ = resume(cut, vote)
    assert result == (at, False)
    better = {**EVALUATION, "auroc": 0.97}
    stop.received = None
    signals = iter([signal.SIGTERM])
    result, _, saved, _ = resume(lambda params, stop: better, lambda: next(signals) is not None)
    assert result == (at, at == 6)  # stopped after it
    assert max(saved) == at and restore().meta["metrics"] == better
    assert saving.locate(tmp_path / "best") == (tmp_path, at)
    result, rows, _, _ = resume(lambda params, stop: EVALUATION, lambda: False)
    assert result == (6, True)
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6]
    assert saving.locate(tmp_path / "best") == (tmp_path, at)


def test_one_that_a_kill_ended_before_the_checkpoint_had_it_is_there_once(drive, batch, monkeypatch) -> None:
    drive(Batches(batch), evaluate=lambda params, stop: None)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving.Checkpoints, "add_evaluation", killed)
        drive(Batches(batch), lambda params, stop: EVALUATION, resume=True)
    _, rows, _, _ = drive(Batches(batch), lambda params, stop: EVALUATION, resume=True)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 6]


def test_the_best_is_saved_at_its_evaluation_and_stays(drive, batch, tmp_path) -> None:
    """Evaluations at 1 .. 6, saves by number at the end only; of the better ones just the best stays."""
    losses = iter([0.5, 0.4, 0.45, float("nan"), 0.3, 0.6])
    scores: list[int] = []

    def evaluate(params, stop):
        scores.append(len(list((tmp_path / "checkpoints").glob("[0-9]"))))
        return {**EVALUATION, "loss": next(losses)}

    options = {"eval_every": 1, "checkpoint_every": 100, "keep_best": "loss", "keep_checkpoints": 1}
    _, _, saved, _ = drive(Batches(batch), evaluate=evaluate, **options)
    assert saved == [5, 6]
    assert saving.locate(tmp_path / "best") == (tmp_path, 5)
    assert saving.read_meta(tmp_path, 5)["metrics"]["loss"] == 0.3
    assert len(scores) == 6


@pytest.mark.parametrize("metric", [name for name in EVAL_METRICS if name != "loss"])
def test_every_metric_of_keep_best_ranks(tmp_path, metric) -> None:
    with contextlib.closing(saving.Checkpoints(tmp_path, keep=1, keep_best=metric)) as checkpoints:
        assert checkpoints.improves({metric: 0.1})
        assert not checkpoints.improves({metric: float("nan")})


def test_a_save_that_fails_in_the_background_ends_the_run(drive, batch, monkeypatch) -> None:
    """At the next step, not at the next save."""
    done = []

    def fail(self) -> None:
        if len(done) == 4:
            raise UserError("cannot write checkpoint")

    monkeypatch.setattr(saving.Checkpoints, "check", fail)
    with pytest.raises(UserError, match="cannot write checkpoint"):
        drive(Batches(batch, before=done.append), checkpoint_every=100)


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
