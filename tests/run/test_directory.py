"""Which directories a run may use."""

from __future__ import annotations

import pathlib
from typing import ClassVar

import pytest

from cfprm_jax.checkpoints import model_files, prm_file
from cfprm_jax.config import EncodingConfig, GranularityConfig, LossConfig, ModelConfig
from cfprm_jax.errors import UserError
from cfprm_jax.run import directory


def test_new_directories(tmp_path) -> None:
    assert directory.check(str(tmp_path / "new"), resume="never") == tmp_path / "new"
    (tmp_path / "notes.txt").touch()
    assert directory.check(str(tmp_path), resume="never") == tmp_path
    assert not (tmp_path / "new").exists()


def test_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="--output_dir is missing"):
        directory.check("", resume="never")
    with pytest.raises(UserError, match=r"--resume=always: .* holds no run"):
        directory.check(str(tmp_path), resume="always")
    (tmp_path / "config.json").touch()
    with pytest.raises(UserError, match=r"holds another run \(config.json\).*--resume"):
        directory.check(str(tmp_path), resume="never")
    assert directory.check(str(tmp_path), resume="always") == tmp_path
    with pytest.raises(UserError, match="is a file"):
        directory.check(str(tmp_path / "config.json"), resume="never")


def test_one_process_at_a_time(tmp_path) -> None:
    run = tmp_path / "new"
    with directory.locked(run, "never"):
        for resume in ("never", "auto"):
            with pytest.raises(UserError, match="another process is training there"), directory.locked(run, resume):
                pass
        (run / "config.json").touch()
    with directory.locked(run, "auto"):
        pass
    # Whoever looked before the other one began looks again.
    with pytest.raises(UserError, match="holds another run"), directory.locked(run, "never"):
        pass


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"head": "linear"}', '{"encoding": {"unheard": 1}}', '{"encoding": {}}', '{"encoding": 3}']
)
def test_prm_files_of_another_kind(tmp_path: pathlib.Path, text: str) -> None:
    assert prm_file.read_prm(tmp_path) == ({}, None)
    (tmp_path / "prm.json").write_text(text)
    with pytest.raises(UserError, match=r"prm.json: .*(expected|JSON)"):
        prm_file.read_prm(tmp_path)


def test_the_backbones_generation_config_is_kept(tmp_path: pathlib.Path) -> None:
    class Tokenizer:
        init_kwargs: ClassVar[dict[str, object]] = {}

        def save_pretrained(self, *_: object, **__: object) -> None: ...

    settings = {
        "model": ModelConfig(),
        "encoding": EncodingConfig(),
        "loss": LossConfig(),
        "granularity": GranularityConfig(),
        "source": tmp_path,
    }
    model_files.write_model(tmp_path / "a", {}, Tokenizer(), **settings)
    assert not (tmp_path / "a" / "model" / "generation_config.json").exists()
    (tmp_path / "generation_config.json").write_text("{}")
    model_files.write_model(tmp_path / "b", {}, Tokenizer(), **settings)
    assert (tmp_path / "b" / "model" / "generation_config.json").read_text() == "{}"
