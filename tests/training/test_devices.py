"""A platform that is not there is an error with its cure; caches."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.training import caches, devices


@pytest.mark.parametrize(("platform", "extra"), [("gpu", r"\.\[cuda12\]"), ("tpu", r"\.\[tpu\]")])
def test_missing_platform(platform: str, extra: str) -> None:
    with pytest.raises(UserError, match=rf"--platform={platform}: .*pip install '{extra}'.*--platform=cpu"):
        devices.select(platform)


def test_present_platform() -> None:
    assert devices.select("cpu") == jax.devices("cpu")
    assert devices.select("auto") == jax.devices()
    assert devices.describe(jax.devices("cpu")[:2]) == "2 x cpu (cpu)"


def test_an_accelerator_that_jax_does_not_use_is_told(tmp_path) -> None:
    card = tmp_path / "nvidia0"
    assert devices.unused_accelerator(jax.devices(), [str(card)]) == ""
    card.touch()
    assert "cuda12" in devices.unused_accelerator(jax.devices(), [str(card)])


def test_cache_directories(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.cache_directory("auto", "corpora") == tmp_path / "cfprm_jax" / "corpora"
    assert caches.cache_directory("here", "corpora") == pathlib.Path("here")
    before = jax.config.jax_compilation_cache_dir
    try:
        assert caches.use_compile_cache("auto") == tmp_path / "cfprm_jax" / "compiled"
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cfprm_jax" / "compiled")
        assert caches.use_compile_cache("") is None
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


_COUNT_FAULTS = """
import resource, sys
import jax, numpy as np
from cfprm_jax.training import devices

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 22)  # 32 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, kept = faults(), devices.keep_freed_memory(jax.devices())
faults()  # the first buffer is new to the process
print(before, faults(), kept)
"""


def test_freed_buffers_are_kept_on_a_cpu() -> None:
    """The second and later buffers of one size cost no page faults once freed memory stays with the process."""
    run = subprocess.run([sys.executable, "-c", _COUNT_FAULTS], capture_output=True, text=True, check=True)
    before, after, kept = run.stdout.split()
    if kept != "True":
        pytest.skip("the C library is not glibc")
    assert int(after) < int(before) / 10
