"""Optional loggers: what each is given, the same run after a resume, and that none can end a run."""

from __future__ import annotations

import json
import pathlib
import sys
import time
import types

import pytest

from cfprm_jax import config, flags
from cfprm_jax.run.loggers import LOGGERS, LoggedRun, Loggers
from cfprm_jax.run.metrics import EVALUATION, MetricLog
from cfprm_jax.run.options import TrainConfig


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Modules wandb and trackio with the signatures of the real ones; the calls that they get."""
    calls: list[tuple] = []

    class Run:
        def log(self, data: dict, step: int | None = None, commit: bool | None = None) -> None:
            calls.append(("wandb.log", step, data))

        def finish(self, exit_code: int | None = None) -> None:
            calls.append(("wandb.finish",))

    def wandb_init(*, project=None, name=None, dir=None, config=None, resume=None, id=None) -> Run:
        calls.append(("wandb.init", project, name, dir, config, resume, id))
        return Run()

    def trackio_init(project, name=None, *, config=None, resume="never") -> None:
        calls.append(("trackio.init", project, name, config, resume))

    def trackio_log(metrics: dict, step: int | None = None) -> None:
        calls.append(("trackio.log", step, metrics))

    modules = {
        "wandb": {"init": wandb_init},
        "trackio": {
            "init": trackio_init,
            "log": trackio_log,
            "finish": lambda: calls.append(("trackio.finish",)),
        },
    }
    for name, functions in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return calls


def open_log(
    directory: pathlib.Path, names: tuple[str, ...], step: int = 0, reported: list[str] | None = None
) -> MetricLog:
    directory.mkdir(exist_ok=True)
    loggers = Loggers(
        names, LoggedRun(directory, step, {"seed": 7}), [].append if reported is None else reported.append
    )
    return MetricLog(directory, step, loggers=loggers)


def read(directory: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_flag_and_classes_name_the_same_loggers() -> None:
    assert tuple(LOGGERS) == config.LOGGERS
    parsed = flags.parse(TrainConfig, ["train", "--logger=wandb,tensorboard"]).run.logger
    assert parsed == ("wandb", "tensorboard")
    assert flags.parse(TrainConfig, ["train", "--logger="]).run.logger == ()


def test_every_logger_gets_the_finite_numbers_of_a_step(tracked, tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    log = open_log(run, ("wandb", "trackio"))
    log.write(10, {"loss": 0.25, "granularity": 2, "auroc": float("nan"), "mfu": None, "stage": "mixed"}, board="train")
    log.write(11, {"loss": 0.5})  # not for the loggers
    log.write(11, {"loss": 0.75}, board="eval", prefix=EVALUATION)
    log.close()
    (name,) = {call[2] for call in tracked if call[0] == "wandb.init"}
    run_id = (run / "logger_id").read_text().strip()
    points, evaluation = {"train/loss": 0.25, "train/granularity": 2}, {"eval/loss": 0.75}
    assert tracked == [
        ("wandb.init", "cfprm_jax", "run", str(run), {"seed": 7}, "allow", run_id),
        ("trackio.init", "cfprm_jax", f"run-{run_id}", {"seed": 7}, "allow"),
        ("wandb.log", 10, points),
        ("trackio.log", 10, points),
        ("wandb.log", 11, evaluation),
        ("trackio.log", 11, evaluation),
        ("wandb.finish",),
        ("trackio.finish",),
    ]
    assert name == "run"
    assert [row["step"] for row in read(run)] == [10, 11, 11]


def test_a_resume_continues_the_same_run(tracked, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_log(tmp_path / "run", ("wandb", "trackio")).close()
    open_log(tmp_path / "run", ("wandb", "trackio"), step=4).close()
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_log(tmp_path / "other", ("wandb", "trackio")).close()
    first, second, other = (call for call in tracked if call[0] == "wandb.init")
    assert first == second and first[-1] != other[-1] and other[1] == "mine"
    first, second, other = (call for call in tracked if call[0] == "trackio.init")
    assert first == second and first[2] != other[2]


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no network\nmore"), SystemExit("not logged in")])
def test_a_logger_that_fails_is_reported_once_and_dropped(
    tracked, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    """The others and metrics.jsonl continue."""

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(sys.modules["trackio"], failing, fail)
    reported: list[str] = []
    log = open_log(tmp_path, ("trackio", "wandb"), reported=reported)
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5}, board="train")
    log.close()
    reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert reported == [f"logger      trackio is dropped, and metrics.jsonl has all metrics: {reason}"]
    assert [call[1] for call in tracked if call[0] == "wandb.log"] == [1, 2, 3]
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3]


def test_a_missing_package_names_the_command_that_installs_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    reported: list[str] = []
    log = open_log(tmp_path, ("wandb",), reported=reported)
    log.write(1, {"loss": 0.5}, board="train")
    log.close()
    assert len(reported) == 1 and "pip install '.[wandb]'" in reported[0]
    assert len(read(tmp_path)) == 1


def test_ctrl_c_is_not_caught(tracked, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    log = open_log(tmp_path, ("trackio",))
    monkeypatch.setattr(sys.modules["trackio"], "log", interrupt)
    with pytest.raises(KeyboardInterrupt):
        log.write(1, {"loss": 0.5}, board="train")


@pytest.fixture
def tensorboard():
    """Reads the event files of a directory: name -> [(step, value)]."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def points(directory: pathlib.Path, name: str) -> list[tuple[int, float]]:
        events = accumulator.EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        return [(event.step, round(event.value, 6)) for event in events.Scalars(name)]

    return points


def test_tensorboard_reads_the_points(tensorboard, tmp_path: pathlib.Path) -> None:
    log = open_log(tmp_path, ("tensorboard",))
    log.write(10, {"loss": 0.25, "granularity": 2}, board="train")
    log.write(11, {"loss": 0.5})  # not for the loggers
    log.close()
    assert tensorboard(tmp_path, "train/loss") == [(10, 0.25)]


def test_a_resumed_run_replaces_its_points_in_tensorboard(tensorboard, tmp_path: pathlib.Path) -> None:
    for start, values in ((0, {1: 0.1, 2: 0.2, 3: 0.3}), (2, {3: 0.33})):
        log = open_log(tmp_path, ("tensorboard",), start)
        for step, value in values.items():
            log.write(step, {"loss": value}, board="eval", prefix=EVALUATION)
        log.close()
        time.sleep(1.01)  # an event file's name has seconds
    assert tensorboard(tmp_path, "eval/loss") == [(1, 0.1), (2, 0.2), (3, 0.33)]
    assert read(tmp_path) == [
        {"step": 1, "eval_loss": 0.1},
        {"step": 2, "eval_loss": 0.2},
        {"step": 3, "eval_loss": 0.33},
    ]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_tensorboard_on_a_full_disk_is_dropped_and_does_not_hang(tmp_path: pathlib.Path) -> None:
    reported: list[str] = []
    log = open_log(tmp_path, ("tensorboard",), reported=reported)
    writer = log._loggers._open["tensorboard"]._writer  # type: ignore[attr-defined]
    writer._py_recordio_writer._writer = open("/dev/full", "wb")  # noqa: SIM115, PTH123
    for step in range(20):
        log.write(step, {"loss": 1.0}, board="train")
    log.close()
    assert len(reported) == 1 and "No space left on device" in reported[0]
    assert len(read(tmp_path)) == 20
