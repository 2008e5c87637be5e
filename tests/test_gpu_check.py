"""The check of one accelerator: it runs on the CPU with tiny shapes and few packages, and reports its results."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench/gpu_check.py"
# What the project needs elsewhere and a bare machine with an accelerator may not have.
ABSENT = (
    "grain",
    "jinja2",
    "math_verify",
    "matplotlib",
    "safetensors",
    "tensorboardX",
    "tokenizers",
    "torch",
    "transformers",
)


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> dict[str, str]:
    """One in which importing any of ABSENT fails, also in the processes of the parts."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT} or name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"{{name}} is not here")


sys.meta_path.insert(0, Refuse())
"""
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    # One device, and barely optimised: compiling is most of what these tests do.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # Several parts compile the same programs.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**os.environ, "XLA_FLAGS": quick, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **cache}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    small = ["--platform=cpu", "--rows=2", "--length=128", "--steps=1", "--optimizer=adamw"]
    command = [sys.executable, SCRIPT, *small, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1100)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_checks_and_measures(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    output = tmp_path / "gpu.json"
    # Limits that a busy machine keeps.
    done = run(environment, "--shapes=tiny", f"--output={output}", "--part_limit=500", "--budget=1000")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    written = json.loads(output.read_text())
    parts = written["parts"]
    assert list(parts) == [
        "parity_cudnn",
        "tiny",
        "determinism",
        "parity_xla",
        "parity_blockwise",
        "parity_pallas",
        "attention",
    ]
    assert written["verdict"] == []
    assert "NVIDIA" in parts["parity_cudnn"]["refused"] and "TPUs" in parts["parity_pallas"]["refused"]
    for backend in ("xla", "blockwise"):
        wide, narrow = parts[f"parity_{backend}"]["rows"][::-1]
        assert (wide["dtype"], narrow["dtype"]) == ("float32", "bfloat16")
        assert wide["error"] < 1e-5 and abs(wide["norm_ratio"] - 1) < 1e-5
        assert 0 < narrow["error"] < 0.05
        assert not narrow["leaks"]
    assert parts["determinism"]["with"]["same_process"] and parts["determinism"]["with"]["other_process"]
    assert [row["attention"] for row in parts["attention"]["rows"]] == ["xla", "blockwise"]
    assert set(parts["attention"]["not_here"]) == {"cudnn", "pallas"}
    tiny = parts["tiny"]
    assert tiny["loss_is_finite"]
    for what in ("score", "train"):
        assert tiny[what]["tokens_per_second"] == pytest.approx(256 / tiny[what]["seconds"])
    assert "tokens/s" in done.stdout
    assert "determinism      with --deterministic: bits equal in one process, equal in another" in done.stdout


def test_a_part_that_is_cut_costs_no_other(environment: dict[str, str]) -> None:
    """A hundredth of a second is enough for none."""
    done = run(environment, "--shapes=tiny", "--part_limit=0.01")
    assert done.returncode == 1
    *parts, verdict = done.stdout.splitlines()[1:]
    assert len(parts) == 7 and all(line.endswith("cut: after 0 s") for line in parts)
    assert verdict.startswith("verdict     parity_cudnn cut: after 0 s; determinism cut: after 0 s;")


def test_the_budget(environment: dict[str, str]) -> None:
    done = run(environment, "--shapes=tiny", "--budget=5")
    parts = done.stdout.splitlines()[1:-1]
    assert len(parts) == 7 and all(line.endswith("left out: 5 s were over") for line in parts)
    assert done.returncode == 1  # nothing was shown


def test_missing_packages_are_listed_at_once(environment: dict[str, str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name in ('flax', 'absl') else find(name, *rest)\n"
    )
    done = run(environment)
    assert done.returncode == 2
    assert done.stderr == "error: gpu_check.py needs flax, absl-py: pip install flax absl-py\n"


def test_what_matters_most_comes_first(check: Any) -> None:
    parts = list(check.order(("7B", "0.5B")))
    assert parts[:3] == ["parity_cudnn", "7B", "determinism"]
    assert parts[-2:] == ["attention", "0.5B"]
    assert len(parts) == len(set(parts)) == 4 + 4
    clock = check.Clock(check.CheckConfig())
    assert set(check.order(("7B",)).values()) == set(check.LIMITS)
    assert clock.limit("shape") == 120
    assert check.CheckConfig().budget + 10 < 480  # a part that was killed may take ten seconds to end


ROW = {"dtype": "bfloat16", "attention": "xla", "passed": True}
EQUAL = {"same_process": True, "other_process": True}


@pytest.mark.parametrize(
    ("part", "kind", "result", "problem"),
    [
        ("parity_xla", "parity", {"rows": [{**ROW, "passed": False}]}, "parity_xla bfloat16 is off"),
        ("parity_xla", "parity", {"rows": [ROW], "failed": "out of memory"}, "parity_xla failed: out of memory"),
        ("determinism", "determinism", {"with": {**EQUAL, "other_process": False}}, "determinism steps differ"),
        ("determinism", "determinism", {"cut": "after 45 s"}, "determinism cut: after 45 s"),
        ("attention", "attention", {"rows": [{**ROW, "passed": False}]}, "attention xla is off"),
        ("7B", "shape", {"loss_is_finite": False}, "7B: the loss is not finite"),
        ("7B", "shape", {"failed": "out of memory"}, None),
        ("determinism", "determinism", {"with": EQUAL, "without": {**EQUAL, "same_process": False}}, None),
        ("parity_cudnn", "parity", {"refused": "not an NVIDIA GPU"}, None),
    ],
)
def test_verdict(check: Any, part: str, kind: str, result: dict[str, Any], problem: str | None) -> None:
    results = {"parity_blockwise": {"rows": [ROW]}, part: result}
    found = check.verdict({"parity_blockwise": "parity", part: kind}, results)
    assert found == ([problem] if problem else [])


def test_nothing_compared_is_no_success(check: Any) -> None:
    assert check.verdict({"parity_cudnn": "parity"}, {"parity_cudnn": {"refused": "no"}}) == [
        "no attention backend was compared with the CPU"
    ]


def test_each_figure_can_fail_a_comparison(environment: dict[str, str]) -> None:
    """In a process of its own, as importing the parts sets JAX up."""
    script = """
import gpu_parts
good = {"error": 1e-4, "cosine": 1.0, "least_cosine": 1.0, "norm_ratio": 1.0}
for dtype, tolerance in gpu_parts.TOLERANCE.items():
    assert tolerance.passes(good)
    for name in good:
        assert not tolerance.passes({**good, name: 0.5}), name
"""
    path = os.pathsep.join([str(SCRIPT.parent), environment["PYTHONPATH"]])
    subprocess.run([sys.executable, "-c", script], env={**environment, "PYTHONPATH": path}, check=True)
