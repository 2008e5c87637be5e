"""What stands in an answer is not run, and a comparison can do nothing but compare."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from cfprm_jax.data.candidates import Candidate, Question
from cfprm_jax.grading import expressions
from cfprm_jax.grading.grader import Grader
from cfprm_jax.grading.processes import Comparer

ROOT = str(pathlib.Path(__file__).parents[2])
MARK = "code_in_an_answer_ran"
# Letters that Python reads as others: a Roman numeral, full-width ones, and a mathematical alphabet.
_OPEN = "open('" + MARK + "','w')"
CODE = [
    f"x*0+{_OPEN}",
    f"({_OPEN})",
    "\uff4f\uff50\uff45\uff4e('" + MARK + "','w')",
    "\U0001d428\U0001d429\U0001d41e\U0001d427('" + MARK + "','w')",
    f"__import__('os').system('touch {MARK}')",
    f"(1).\u217eo\u217d__.__class__+{_OPEN}",
    f"().\u005f\u005f\u217e\u006f\u217d__[0]+{_OPEN}",
    f"lambda: {_OPEN}",
    f"[{_OPEN} for x in (1,)]",
    f"x if {_OPEN} else 2",
    f"\\text{{{_OPEN}}}+1",
    f"x_{{{_OPEN}}}+1",
    f"\\operatorname{{open}}({MARK},w)",
    f"5.{_OPEN}",
    "\\operatorname{eye}(99999)",
    "().\u217e\u2170ff(()).x",
    "5\n" + _OPEN,
]


@pytest.mark.parametrize("grader", ["math_verify", "prm800k"])
def test_code_in_answers_is_a_wrong_answer(grader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the processes start here
    with Grader(grader, 20) as made:
        candidates = [Candidate(text="", predicted=code) for code in CODE]
        items = [Question("q", "?", gold, candidates, "c:1", None) for gold in ("\\frac{1}{2}", "x+1")]
        items += [Question("q", "?", code, [Candidate(text="", predicted="x+2")], "c:1", None) for code in CODE]
        judged = list(made.judge(items))
        report = made.report()
    assert not any(judgement.correct.any() for _, judgement in judged)
    # They are refused by what reads them, before the process has to stop them.
    assert report["pairs_without_verdict"] == []
    assert list(tmp_path.iterdir()) == []


REFUSALS = """
import sys, os, socket, subprocess
from cfprm_jax.grading import worker
worker._limit_resources(60)
sys.addaudithook(worker._refuse)
def refused(act):
    try:
        act()
    except worker.Refused:
        return True
    return False
assert refused(lambda: eval("1+1"))
assert refused(lambda: exec("x = 1"))
assert refused(lambda: eval(compile("1", "", "eval")))
assert refused(lambda: open("written", "w"))
assert refused(lambda: os.open("written", os.O_CREAT | os.O_WRONLY))
assert refused(lambda: os.system("true"))
assert refused(lambda: subprocess.run(["true"]))
assert refused(os.fork)
assert refused(socket.socket)
assert not refused(lambda: open(worker.__file__).read())
import collections, dataclasses, wave  # a module that was not there before
collections.namedtuple("N", "a b"); dataclasses.make_dataclass("D", ["a"])
import resource
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
assert resource.getrlimit(resource.RLIMIT_AS)[0] == worker._MEMORY
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= worker._OPEN_FILES
print("done")
"""


def test_a_comparing_process_evaluates_writes_and_starts_nothing(tmp_path):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {ROOT!r})\n{REFUSALS}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_that_would_evaluate_text_has_no_verdict(tmp_path, monkeypatch):
    # A rule that failed: its process stops it and reports that.
    (tmp_path / "slipped.py").write_text("def equal(predicted, gold):\n    return eval(predicted) == eval(gold)\n")
    command = (
        "import sys; sys.path[:0] = [sys.argv[1], " + repr(str(tmp_path)) + "]; from cfprm_jax.grading import worker; "
        "worker.RULES = {'prm800k': 'slipped'}; worker._WARM_UP = ('1', '1'); "
        "worker.main(sys.argv[2], float(sys.argv[3]))"
    )
    monkeypatch.setattr("cfprm_jax.grading.processes._COMMAND", command)
    comparer = Comparer("prm800k", 20)
    try:
        assert comparer.equal("1+1", "2") is None
        assert [stopped.reason for stopped in comparer.stopped] == ["Refused: evaluation of text"]
    finally:
        comparer.close()


def test_what_grows_without_a_bound_is_refused_at_once():
    comparer = Comparer("prm800k", 20)
    try:
        for text in ("9^9^9+x", "((((9^9)^9)^9)^9)^9+x", "9999999999!+x", "(" * 900 + "x" + ")" * 900):
            assert comparer.equal(text, "x+1") is False
        assert comparer.stopped == []
    finally:
        comparer.close()
    assert expressions.MAX_BITS < 1 << 20
