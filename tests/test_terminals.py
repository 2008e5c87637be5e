"""Commands in processes of their own whose terminal, streams, locale or home are not what they should be."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import pytest
from tiny_runs import ROOT, before_step, finish, same_result, wait_for_step

from cfprm_jax import bon, experiment, export, flags, plan, prepare, process_bench, sample, score, train
from cfprm_jax.evaluation.options import BonConfig

COMMANDS = {
    module.__name__.removeprefix("cfprm_jax."): module
    for module in (bon, experiment, export, plan, prepare, process_bench, sample, score, train)
}
# Runs a command; when it imports absl, which all do before they read their flags, Ctrl-C comes.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "absl":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
# As a terminal starts it: a test run in the background inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(f"cfprm_jax.{sys.argv[1]}", run_name="__main__", alter_sys=True)
"""


def environment(**changed: str | None) -> dict[str, str]:
    """Of a process; None takes a variable away."""
    names = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **changed}
    return {name: value for name, value in names.items() if value is not None}


def command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"cfprm_jax.{name}", *arguments]


def redirected(redirections: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that redirects its streams."""
    given = ["sh", "-c", f'exec "$@" {redirections}', "sh", *arguments]
    return subprocess.run(given, env=environment(), capture_output=True, text=True)


@pytest.fixture
def corpus(tmp_path) -> pathlib.Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"prompt": "é?", "completions": ["a", "b"], "labels": [true, 0.25]}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_interrupt_while_modules_are_imported_is_one_line(name: str) -> None:
    given = [sys.executable, "-c", INTERRUPTED, name]
    run = subprocess.run(given, env=environment(), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (130, "stopped by SIGINT before the command began\n")


@pytest.mark.parametrize(
    ("redirections", "note"),
    [
        (">&-", ""),
        ("2>&-", ""),
        ("<&- >&- 2>&-", ""),
        (">/dev/full", "note: standard output: No space left on device; the command continues without it\n"),
        ("2>/dev/full", ""),
        (">/dev/full 2>&1", ""),
    ],
)
def test_streams_that_cannot_be_written_to_change_no_file(tmp_path, corpus, redirections: str, note: str) -> None:
    if "/dev/full" in redirections and not pathlib.Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    run = redirected(redirections, command("prepare", f"--input={corpus}", f"--output={tmp_path}/out.jsonl"))
    assert (run.returncode, run.stderr) == (0, note)
    row = {"prompt": "é?", "completions": ["a", "b"], "labels": [1.0, 0.25], "granularity": 1}
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == {**row, "source": "corpus.jsonl:1"}
    assert json.loads((tmp_path / "out.report.json").read_text(encoding="utf-8"))["written"] == 1


def test_the_status_of_an_error_with_closed_stderr(tmp_path) -> None:
    assert redirected("2>&-", command("prepare", "--input=gone", f"--output={tmp_path}/out.jsonl")).returncode == 2


def test_help_into_a_closed_pipe_prints_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        command("prepare", "--help"), env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (run.returncode, run.stderr) == (0, "")


# The locale C as Python coerces it, C without coercion, and streams that are ASCII in any locale.
LOCALES = [
    {"LC_ALL": "C"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
]


@pytest.mark.parametrize(("name", "locale"), [*(("prepare", locale) for locale in LOCALES), ("bon", LOCALES[1])])
def test_names_beyond_ascii_in_any_locale(tmp_path, corpus, name: str, locale: dict[str, str]) -> None:
    folder = tmp_path / "Übung 模"
    folder.mkdir()
    source, output = folder / "ä.jsonl", folder / "ö.jsonl"
    if name == "prepare":
        corpus.rename(source)
        given = command("prepare", f"--input={source}", f"--output={output}")
    else:
        candidates = [{"text": "ü", "step_scores": [0.5], "correct": True, "predicted": "ü"}]
        row = {"id": "ß", "question": "é?", "answer": "ü", "candidates": candidates}
        source.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
        given = command("bon", f"--input={source}", "--n=1", "--grader=none", f"--output_dir={output}")
    run = subprocess.run(given, env=environment(**locale), capture_output=True)
    assert run.returncode == 0, run.stderr.decode()
    if name == "prepare":
        assert json.loads(output.read_text(encoding="utf-8"))["source"] == "ä.jsonl:1"
    else:
        config = json.loads((output / "results.json").read_text(encoding="utf-8"))["config"]
        assert config["input"] == [str(source)]
        flag_file = flags.parse(BonConfig, ["bon", f"--flagfile={output / 'run.flags'}"])
        assert flag_file.output_dir == str(output)


def test_a_name_that_is_no_utf8(tmp_path, corpus) -> None:
    """A pattern finds it, and its bytes are recorded as escapes; as a flag it is refused in one line."""
    source = tmp_path / os.fsdecode(b"b\xe9d.jsonl")
    try:
        corpus.rename(source)
    except OSError:
        pytest.skip("the file system takes no such name")
    output = f"--output={tmp_path}/out.jsonl"
    for path, status in ((f"{tmp_path}/b*.jsonl", 0), (str(source), 2)):
        given = command("prepare", f"--input={path}", output)
        run = subprocess.run(given, env=environment(LC_ALL="C.UTF-8"), capture_output=True)
        assert run.returncode == status, run.stderr
        assert len(run.stderr.splitlines()) == bool(status)
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["source"] == r"b\xe9d.jsonl:1"


BELOW_A_FILE = {
    "bon": ["--input={file}", "--output_dir={file}/out"],
    "experiment": ["--output_dir={file}/out"],
    "export": ["--checkpoint=gone", "--output_dir={file}/out"],
    "plan": ["--model=Qwen/Qwen2.5-Math-7B", "--output={file}/out"],
    "prepare": ["--input={file}", "--output={file}/out"],
    "process_bench": ["--input={file}", "--output_dir={file}/out"],
    "sample": ["--model=gone", "--questions={file}", "--output={file}/out"],
    "score": ["--model=gone", "--input={file}", "--output={file}/out"],
    "train": ["--train_data={file}", "--model=gone", "--output_dir={file}/out"],
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_output_below_a_file_is_found_out_first(tmp_path, corpus, capsys, name: str) -> None:
    module = COMMANDS[name]
    (config,) = (value for key, value in vars(module).items() if key.lower() == f"{name.replace('_', '')}config")
    arguments = [argument.format(file=corpus) for argument in BELOW_A_FILE[name]]
    assert flags.run(config, module.main, [name, *arguments]) == 2
    assert capsys.readouterr().err == f"error: {arguments[-1]}: {corpus} is a file\n"


def test_a_closed_terminal_a_comma_in_the_name_and_a_reader_who_leaves(tiny) -> None:
    """SIGHUP saves and stops; the command that is printed resumes, and `| head -3` does not end it: all is as ever."""
    straight, _ = tiny.straight()
    run = tiny.directory / "one,two"
    process = tiny.start(tiny.arguments(run.name), patch=before_step(8))
    wait_for_step(process, run, 4)
    process.send_signal(signal.SIGHUP)
    tiny.release(process)
    line = finish(process).splitlines()[-1]
    assert line.startswith("stopped by SIGHUP after step ")
    resume = shlex.split(line.partition("resume with: ")[2])
    process = subprocess.Popen(
        [sys.executable, *resume[1:]],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    for _ in range(3):
        process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 0, errors
    assert "note: standard output: Broken pipe; the command continues without it" in errors
    assert "Traceback" not in errors
    same_result(straight, run)


def test_a_hangup_is_ignored_under_nohup() -> None:
    code = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from cfprm_jax.runtime.signals import StopSignal
with StopSignal().installed() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    print(stop())
"""
    run = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert run.stdout == "None\n"
