"""The script for one accelerator runs, on the CPU and a tiny shape, without Grain, and says what it found."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench/gpu_check.py"


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """One in which importing Grain fails."""
    (tmp_path / "grain").mkdir()
    (tmp_path / "grain/__init__.py").write_text("raise ImportError('Grain is not here')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return {**{k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, "--platform=cpu", "--rows=2", "--length=128", "--steps=1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_checks_and_measures(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    output = tmp_path / "gpu.json"
    done = run(environment, "--shapes=tiny", f"--output={output}")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    parts = json.loads(output.read_text())["parts"]
    checked = {(row["dtype"], row["attention"]): row for row in parts["parity"]["rows"]}
    assert checked["bfloat16", "xla"]["passed"] and not checked["bfloat16", "xla"]["leaks"]
    assert "NVIDIA" in checked["bfloat16", "cudnn"]["refused"]
    assert 0 < checked["bfloat16", "xla"]["score_error"] < 0.05
    tiny = parts["tiny"]
    assert tiny["loss_is_finite"]
    for what in ("score", "train"):
        assert tiny[what]["tokens_per_second"] == pytest.approx(256 / tiny[what]["seconds"])
    assert "tokens/s" in done.stdout


def test_a_part_that_fails_costs_no_other(environment: dict[str, str]) -> None:
    done = run(environment, "--shapes=9B", "--budget=600")
    assert done.returncode == 0
    assert "9B      failed: error: --shapes: '9B' is no size of Qwen2.5" in done.stdout
    assert "parity" in done.stdout


def test_the_budget(environment: dict[str, str]) -> None:
    done = run(environment, "--shapes=tiny", "--budget=0")
    assert done.stdout.count("left out: 0 s were over") == 2
    assert done.returncode == 1  # nothing was shown
