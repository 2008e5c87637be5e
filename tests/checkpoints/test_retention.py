"""Which checkpoints stay, on real folders."""

from __future__ import annotations

import math
import pathlib

import pytest

from cfprm_jax.checkpoints import retention


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    """Three checkpoints, and what a killed process has left of two more."""
    for name in ("3", "12", "20", "21.orbax-checkpoint-tmp", "21.orbax-checkpoint-tmp-17", "7.removed", "9.damaged"):
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    return tmp_path / "checkpoints"


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_complete(folder, tmp_path) -> None:
    assert retention.complete(folder) == [3, 12, 20]
    assert retention.complete(tmp_path / "nowhere") == []


def test_what_was_cut_short_goes(folder) -> None:
    retention.clear_unfinished(folder, 7)
    assert "7.removed" not in names(folder) and "21.orbax-checkpoint-tmp" in names(folder)
    retention.clear_unfinished(folder)
    assert names(folder) == {"3", "12", "20", "9.damaged"}
    retention.clear_unfinished(folder / "nowhere")


def test_remove(folder) -> None:
    retention.remove(folder, [3, 4, 12])
    assert retention.complete(folder) == [20]
    assert not (folder / "3.removed").exists()


def test_set_aside_never_overwrites(folder) -> None:
    assert retention.set_aside(folder, 20).name == "20.damaged"
    (folder / "20").mkdir()
    assert retention.set_aside(folder, 20).name == "20.damaged.1"
    assert retention.complete(folder) == [3, 12]


def test_best_by_its_direction() -> None:
    metrics = {1: {"loss": 0.5, "auroc": 0.7}, 2: {"loss": 0.4, "auroc": 0.9}, 3: None, 4: {"loss": 0.4, "auroc": None}}
    assert retention.best(metrics, metrics.get, "loss") == 2  # the first of equals
    assert retention.best(metrics, metrics.get, "auroc") == 2
    assert retention.best([3], metrics.get, "loss") is None
    assert retention.best([], metrics.get, "loss") is None
    assert retention.value("loss", {"loss": math.nan}) == -math.inf
    assert retention.value("loss", {"loss": 0.5}) < retention.value("loss", {"loss": 0.4})


def test_the_link_to_the_best_moves(folder) -> None:
    run = folder.parent
    for step in (3, 12):
        retention.point_to_best(run, folder / str(step))
        assert (run / "best").resolve() == (folder / str(step)).resolve()
    assert not (run / "best").readlink().is_absolute()  # the run may be moved
