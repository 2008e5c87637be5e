"""cfprm COMMAND: every command under one name."""

from __future__ import annotations

import importlib
import pathlib
import sys

import pytest

from cfprm_jax import __main__ as cfprm
from cfprm_jax import flags

ROOT = pathlib.Path(cfprm.__file__).parent


def test_lists_every_command_and_nothing_else():
    commands = {path.stem for path in ROOT.glob("*.py") if '\nif __name__ == "__main__":' in path.read_text()}
    assert set(cfprm.COMMANDS) == commands - {"__main__"}


def test_help_names_every_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cfprm"])
    cfprm.main()
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cfprm.COMMANDS)


@pytest.mark.parametrize(("name", "flag"), [("bon", "aggregation"), ("prepare", "exclude_questions")])
def test_runs_a_command_with_its_flags(name, flag, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cfprm", name, "--help"])
    # Another test of the same process may have imported it, which runpy warns of.
    monkeypatch.delitem(sys.modules, f"cfprm_jax.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        cfprm.main()
    assert not ended.value.code
    assert f"--{flag}" in capsys.readouterr().out


def test_an_unknown_command_is_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["cfprm", "trian"])
    with pytest.raises(SystemExit, match="'trian' is not a command"):
        cfprm.main()


@pytest.mark.parametrize(
    ("command", "good", "flag", "value"),
    [
        ("train", "--init=random", "train_data", "gone.jsonl"),
        ("train", "--train_data=synthetic", "eval_data", "gone.jsonl"),
        ("train", "--train_data=synthetic", "bon_candidates", "gone.jsonl"),
        ("experiment", "--tests=a={here}", "train_data", "gone.jsonl"),
        ("experiment", "--train_data={here}", "tests", "a=gone.jsonl"),
        ("experiment", "--grid=real --train_data={here}", "pool", "gone.jsonl"),
        ("sample", "", "questions", "gone.jsonl"),
        ("search", "--reward=/nowhere", "questions", "gone.jsonl"),
        ("label", "", "input", "gone.jsonl"),
        ("label", "--method=consensus --input={here}", "judge", "gone.jsonl"),
        ("score", "", "input", "gone*.jsonl"),
        ("process_bench", "", "input", "gone.jsonl"),
        ("prm_bench", "--input={here}", "exclude_questions", "gone.jsonl"),
        ("bon", "--input={here}", "input2", "gone.jsonl"),
        ("prepare", "--input={here}", "exclude_questions", "gone.jsonl"),
    ],
)
def test_a_missing_input_file_is_an_error_before_anything_else(command, good, flag, value, tmp_path, capsys):
    """It names the flag, comes before the model, which is not there either, and leaves nothing behind."""
    module = importlib.import_module(f"cfprm_jax.{command}")
    # A file that would be refused, so that an error about it shows that it was read first.
    (tmp_path / "here").write_text("{}")
    name = "output_dir" if command in ("train", "experiment", "process_bench", "prm_bench", "bon") else "output"
    given = [*good.format(here=tmp_path / "here").split(), f"--{flag}={value}", f"--{name}={tmp_path / 'out'}"]
    if command not in ("bon", "prepare") and flag != "judge":
        given.append("--model=/nowhere")
    (config,) = (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__name__.endswith("Config"))
    assert flags.run(config, module.main, [command, *given]) == 2
    missing = value.removeprefix("a=")
    expected = f"error: --{flag}={missing}: no such file{' matches' if '*' in missing else ''}\n"
    assert capsys.readouterr().err == expected
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
