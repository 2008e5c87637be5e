"""SIGTERM and Ctrl-C at any time of a real run: one line with what is saved and how to resume, and an exit status."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess
import threading

import pytest
from tiny_runs import BEFORE_BEST_OF_N, before_step, finish, rows, same_result

from cfprm_jax.checkpoints import retention, saving

NOTHING_SAVED = "no step is saved yet; start the same command again, with --resume=auto"


def signalled(process: subprocess.Popen, line: str, number: signal.Signals) -> tuple[int, str]:
    """Status and output of a process that got a signal when it had printed a line that begins so."""
    limit = threading.Timer(200, process.kill)
    limit.start()
    printed = []
    for text in process.stdout:
        printed.append(text)
        if text.startswith(line):
            process.send_signal(number)
            break
    printed.append(process.stdout.read())
    status = process.wait()
    limit.cancel()
    return status, "".join(printed)


@pytest.mark.parametrize(
    ("line", "number", "status"),
    [("devices", signal.SIGTERM, 75), ("model", signal.SIGINT, 130), ("steps", signal.SIGTERM, 75)],
)
def test_before_the_first_step(tiny, line: str, number: signal.Signals, status: int) -> None:
    """While it reads, tokenises and loads: nothing is waited for."""
    given = tiny.arguments(f"before_{line}", preemption_exit_code=75)
    ended, text = signalled(tiny.start(given, patch=before_step(1)), line, number)
    assert ended == status
    assert text.splitlines()[-1] == f"stopped by {number.name}; {NOTHING_SAVED}"
    assert "Traceback" not in text and "error" not in text


def test_while_the_first_step_compiles(tiny) -> None:
    """Again with --resume=auto it trains from the start."""
    given = tiny.arguments("compiling", max_steps=2)
    text = finish(tiny.start(given, patch='before(loop.rules, "put_batch", 1, lambda: send(signal.SIGTERM))'), status=0)
    assert text.splitlines()[-1] == f"stopped by SIGTERM; {NOTHING_SAVED}"
    assert not rows(tiny.directory / "compiling")
    assert "done        2 steps" in finish(tiny.start([*given, "--resume=auto"]))


def test_during_best_of_n_which_is_all_that_is_left(tiny) -> None:
    candidates = tiny.directory / "candidates.jsonl"
    texts = [{"text": f"1+{i}\n\n{i}", "correct": i == 2} for i in range(4)]
    candidates.write_text(json.dumps({"id": "q", "question": "q", "answer": "2", "candidates": texts}) + "\n")
    given = [*tiny.arguments("choosing", max_steps=4), f"--bon_candidates={candidates}", "--bon_n=2,4"]
    run = tiny.directory / "choosing"
    status, text = signalled(
        tiny.start([*given, "--preemption_exit_code=75"], patch=BEFORE_BEST_OF_N), "done", signal.SIGTERM
    )
    assert status == 75
    command = f"python -m cfprm_jax.train --flagfile={run}/run.flags --resume=auto"
    assert text.splitlines()[-1] == f"stopped by SIGTERM; step 4 is saved; resume with: {command}"
    assert not (run / "best_of_n").exists()
    before = (run / "metrics.jsonl").read_text()
    text = finish(tiny.start(command.split()[3:]))
    assert "done        0 steps" in text
    assert (run / "best_of_n" / "report.html").is_file()
    assert (run / "metrics.jsonl").read_text() == before


EVALUATED = {"eval_every": 6, "max_steps": 12, "keep_best": "auroc", "checkpoint_every": 1000}


@pytest.fixture(scope="module")
def evaluated(tiny) -> pathlib.Path:
    """An undisturbed run with evaluations."""
    finish(tiny.start(tiny.arguments("evaluated", **EVALUATED)))
    return tiny.directory / "evaluated"


@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_evaluation_that_is_cut_off_is_made_up(tiny, evaluated, last: bool) -> None:
    """By a signal, at the last step too, and by a kill when it is made up: in the end all is as if undisturbed."""
    straight, run = evaluated, tiny.directory / f"cut_off_{last}"
    step = 12 if last else 6
    given = tiny.arguments(run.name, **EVALUATED)
    cut = f'before(evaluation, "evaluate", {step // 6}, lambda: send(signal.SIGTERM))'
    text = finish(tiny.start(given, patch=cut), status=0)
    assert f"stopped by SIGTERM after step {step}, which is saved; resume with: " in text
    assert "done  " not in text
    assert saving.read_meta(run, step)["metrics"] is None
    again = [*given, "--resume=auto"]
    killed = 'before(saving.Checkpoints, "add_evaluation", 1, lambda: send(signal.SIGKILL))'
    finish(tiny.start(again, patch=killed), status=-signal.SIGKILL)
    assert [row["step"] for row in rows(run) if "eval_auroc" in row] == [6, 12][: step // 6]
    assert saving.read_meta(run, step)["metrics"] is None
    finish(tiny.start(again))
    same_result(straight, run)
    for at in retention.complete(straight / "checkpoints"):
        metrics = [saving.read_meta(directory, at)["metrics"] for directory in (straight, run)]
        assert metrics[0] is not None and metrics[0] == metrics[1]
    assert (straight / "best").resolve().name == (run / "best").resolve().name


def test_a_second_interrupt_does_not_wait(tiny) -> None:
    given = tiny.arguments("twice", max_steps=12, checkpoint_every=2)
    twice = 'before(loop.rules, "put_batch", 7, lambda: (send(signal.SIGINT), send(signal.SIGINT)))'
    text = finish(tiny.start(given, patch=twice), status=130)
    assert re.match(r"stopped by SIGINT; step [46] is saved; resume with: ", text.splitlines()[-1])
    assert "Traceback" not in text
