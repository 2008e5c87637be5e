"""What every test file may use."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# Eight host devices, so that meshes are real; set before anything imports jax.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Hugging Face libraries must never reach for the network from a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

# Random inputs that are the same in every run, so that a failure is of the change at hand and not of the day;
# `--hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

# Helpers that several test files import, which pytest's importlib mode does not look for beside them: tiny_runs.
sys.path.append(str(pathlib.Path(__file__).parent))

# The files that begin first, the longest in front: a worker that began one of them last would end alone.
LONGEST = (
    "aot/test_ahead",
    "test_experiment",
    "runtime/test_distributed",
    "checkpoints/test_damage",
    "training/test_step",
    "test_train_signals",
    "test_train_frozen",
    "test_gpu_check",
    "test_train_survival",
    "test_terminals",
    "test_train_lora",
    "test_label_weight",
    "test_train",
    "test_score",
    "test_launch",
    "test_benches",
    "test_redundancy",
    "run/test_warm_start",
    "test_train_formats",
    "aot/test_attention_ahead",
    "aot/test_remedies_ahead",
    "training/test_optimizer",
    "test_invariance",
    "inference/test_sampler",
    "inference/test_decoder",
    "models/test_embedding",
    "models/test_lora",
    "models/test_backbone",
    "models/test_families",
    "training/test_mesh_parity",
    "training/test_frozen",
    "checkpoints/test_saving",
    "test_sample",
    "test_search",
    "test_plan",
    "inference/test_choice",
    "test_serve",
    "runtime/test_out_of_memory",
    "checkpoints/test_stored_params",
    "run/test_loop",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests that are marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; --no-loadscope-reorder in pyproject.toml keeps this order."""
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="slow, and close to a test that runs: pytest --slow runs both")
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(skip)
    here = pathlib.Path(__file__).parent
    rank = {here / f"{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of real data beside the repository; a test that requires it is skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder of real data (shared/) beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, compiled_programs):
    """Runs of train in processes of their own; see tiny_runs.py."""
    from tiny_runs import TinyRuns

    return TinyRuns(tmp_path_factory.mktemp("tiny"), compiled_programs)


@pytest.fixture(scope="module")
def one_device() -> Iterator[None]:
    """JAX shows one device, so that rows need not be multiples of eight."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        first = jax.devices()[:1]
        patch.setattr(jax, "devices", lambda *_: first)
        yield


def _start_compiling(changed: Mapping[str, Any]) -> None:
    """Change JAX's configuration, and compile with it also what was compiled without."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    for name, value in changed.items():
        jax.config.update(name, value)
    jax.clear_caches()
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory) -> pathlib.Path:
    """A directory that all workers of one pytest run share."""
    base = tmp_path_factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module", autouse=True)
def compiling(request) -> Iterator[None]:
    """For files marked compile_once no test compiles again what is compiled; quick_compile: LLVM barely optimises, too.

    JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the environment leaves LLVM as it is.
    """
    quick = request.node.get_closest_marker("quick_compile") is not None
    if not quick and request.node.get_closest_marker("compile_once") is None:
        yield
        return
    import jax

    changed: dict[str, Any] = {
        "jax_compilation_cache_dir": str(request.getfixturevalue("compiled_programs")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before: dict[str, Any] = {name: getattr(jax.config, name) for name in changed}
    if quick and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        changed["jax_disable_most_optimizations"], before["jax_disable_most_optimizations"] = True, False
    _start_compiling(changed)
    # JAX opens the cache with its first program, and then uses it whatever --compile_cache_dir a command is given.
    jax.jit(lambda x: x + 1)(1)
    yield
    _start_compiling(before)
