"""cfprm COMMAND: every command under one name."""

from __future__ import annotations

import pathlib
import sys

import pytest

from cfprm_jax import __main__ as cfprm

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
