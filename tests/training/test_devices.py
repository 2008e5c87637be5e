"""A platform that is not there is an error with its cure; caches."""

from __future__ import annotations

import pathlib

import jax
import pytest

from cfprm_jax.errors import UserError
from cfprm_jax.training import caches, devices


@pytest.mark.parametrize(("platform", "extra"), [("gpu", r"cfprm-jax\[cuda12\]"), ("tpu", r"cfprm-jax\[tpu\]")])
def test_missing_platform(platform: str, extra: str) -> None:
    with pytest.raises(UserError, match=rf"--platform={platform}: .*pip install \"{extra}\".*--platform=cpu"):
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
