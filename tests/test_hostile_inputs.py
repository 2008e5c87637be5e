"""Mutated inputs and flags end in one line or in a right result: no other exception, no wait, no nonsense taken.

In process, with a fixed seed, at the level of reading and parsing, and through the commands that need no network.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pathlib
import random
import signal
import typing

import numpy as np
import pytest
from hostile_inputs import FILE_CHANGES, encode, flag_values, mutate_row

from cfprm_jax import __main__ as cfprm
from cfprm_jax import flags, prepare
from cfprm_jax.benchmarks import prm_bench, process_bench
from cfprm_jax.benchmarks.options import PRMBenchConfig, ProcessBenchConfig
from cfprm_jax.data import formats
from cfprm_jax.data.candidates import read_candidates
from cfprm_jax.data.question_files import read_question_files
from cfprm_jax.data.questions import read_questions
from cfprm_jax.data.step_cases import read_cases
from cfprm_jax.errors import UserError
from cfprm_jax.evaluation.case_scores import CaseScores, ScoreTable, read_scores
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.report import best_of_n as best_of_n_report
from cfprm_jax.report import prm_bench as prm_bench_report
from cfprm_jax.run.options import TrainConfig
from cfprm_jax.run.validate import validate_options
from cfprm_jax.runtime import config_files
from cfprm_jax.sharding import rules

INPUTS = pathlib.Path(__file__).parent / "data" / "inputs"
CORPORA = ("prm800k", "stepwise", "math_shepherd", "rlhflow", "rest_mcts", "math_aps", "ratings")
COMMANDS = {
    name: typing.get_type_hints(importlib.import_module(f"cfprm_jax.{name}").main)["config"] for name in cfprm.COMMANDS
}
# No option takes a larger number: it would exceed memory, time or float32.
LARGEST = 2**32

CANDIDATES = [
    {
        "id": name,
        "question": f"What is {number} + 1?",
        "answer": str(number + 1),
        "dataset": "sums",
        "level": 1,
        "candidates": [
            {"text": f"It is {number}.", "step_scores": [0.25], "predicted": str(number), "correct": False},
            {
                "steps": ["One more.", f"\\boxed{{{number + 1}}}"],
                "step_scores": [0.9, 0.75],
                "step_logits": [2.2, 1.1],
                "predicted": str(number + 1),
                "correct": True,
            },
        ][number % 2 :]
        * 2,
    }
    for number, name in enumerate("abc")
]
for _row in CANDIDATES:
    for _candidate in _row["candidates"]:
        _candidate.pop("step_logits", None)
QUESTIONS = [
    {"problem": "1 + 1?", "solution": "\\boxed{2}", "answer": "2", "subject": "A", "level": 1, "unique_id": "a/1"},
    {"question": "2 + 2?", "answer": "Four. #### 4"},
    {"id": 3, "question": "3 + 3?", "answer": 6, "dataset": "mine"},
]
PROCESS_BENCH = [
    {"id": "gsm8k-1", "problem": "1 + 1?", "steps": ["a", "b"], "label": 1, "step_scores": [0.9, 0.2]},
    {"id": "gsm8k-2", "problem": "2 + 2?", "steps": ["a"], "label": -1, "step_scores": [0.8]},
    {"id": "x", "problem": "3 + 3?", "steps": ["a", "b"], "label": 0, "step_scores": None, "subset": "own"},
]
_PRM_ROW = {
    "original_question": "1 + 1?",
    "modified_question": "1 + 1 at most?",
    "original_process": ["a", "b"],
    "modified_process": ["a", "b", "c"],
    "error_steps": [2],
    "idx": "t_1",
}
PRM_BENCH = [
    {**_PRM_ROW, "classification": "redundency"},
    {**_PRM_ROW, "classification": "multi_solutions", "error_steps": []},
    {"id": 0, "question": "2 + 2?", "model_output_step_format": [["a"], ["b", "c"]], "rating": [1, 0]},
    {
        "uuid": "u",
        "question": "3 + 3?",
        "model_output_steps": ["a", "b"],
        "model_output_solution_correctness": "wrong",
        "model_output_solution_first_error_step": "2",
        "model_output_answer_correctness": "correct",
    },
]
_SCORED = {"question": "1 + 1 at most?", "steps": ["a", "b", "c"], "step_scores": [0.9, 0.1, 0.5], "idx": "t_1"}
CASE_SCORES = [
    {**_SCORED, "classification": "redundency", "step_redundancy": [0.1, 0.2, 1], "error_steps": [2]},
    {**_SCORED, "classification": "multi_solutions", "step_redundancy": [0.1, 0, 1], "error_steps": []},
]


def corpus_rows(name):
    return [json.loads(line) for line in (INPUTS / f"{name}.jsonl").read_text().splitlines()]


def read_corpus(path):
    for trajectory in formats.read(path):
        labels = trajectory.labels
        assert np.all(np.isnan(labels) | ((labels >= 0) & (labels <= 1)))
        assert len(labels) == len(trajectory.steps) > 0
        json.dumps([trajectory.question, *trajectory.steps], ensure_ascii=False).encode()


def read_scored(path):
    for question in read_candidates(path):
        json.dumps(question.row, ensure_ascii=False, allow_nan=False).encode()
        for candidate in question.candidates:
            assert candidate.step_scores is None or np.all((candidate.step_scores >= 0) & (candidate.step_scores <= 1))


def read_to_sample(path):
    for row in read_question_files(path):
        json.dumps([row.id, row.question, row.answer, row.dataset, row.rest], allow_nan=False).encode()


def run_prepare(path):
    out = path.with_name("out.jsonl")
    config = flags.parse(prepare.PrepareConfig, ["prepare", f"--input={path}", f"--output={out}", "--c_max=2"])
    prepare.main(config)
    assert [json.loads(line) for line in out.read_text().splitlines()]


def run_bon(path):
    directory = path.with_name("bon")
    arguments = [f"--input={path}", "--n=1,2", "--grader=none", "--resamples=100", "--aggregation=min"]
    config = flags.parse(BonConfig, ["bon", *arguments, f"--output_dir={directory}"])
    result = best_of_n_report.evaluate(best_of_n_report.read(config.input), config)
    directory.mkdir(exist_ok=True)
    best_of_n_report.write(result, directory)
    text = (directory / "results.json").read_text()
    assert json.dumps(json.loads(text), allow_nan=False)


def run_process_bench(path):
    found = list(process_bench.read([str(path)]))
    process_bench.check_scored(found)
    config = ProcessBenchConfig(input=(str(path),))
    json.dumps(process_bench.evaluate(found, config), allow_nan=False)
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


def run_prm_bench(path):
    found = read_cases(str(path))
    config = PRMBenchConfig(input=(str(path),), resamples=100)
    scores = {
        case.key: CaseScores(np.linspace(0.1, 0.9, len(case.steps)), np.linspace(0, 1, len(case.steps)))
        for case in found.cases[1:]
    }
    table = ScoreTable(scores, (), 0)
    outcome = prm_bench.evaluate(found, table, config, table, frozenset())
    json.dumps(outcome, allow_nan=False)
    shown = [(case, scores[case.key]) for case in found.cases[1:]]
    texts = (prm_bench_report.document(outcome), prm_bench_report.latex(outcome))
    "".join([*texts, prm_bench_report.page(outcome, shown, 0)]).encode()


def read_case_scores(path):
    source = path.with_name("cases.jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in PRM_BENCH))
    for scores in read_scores(str(path), read_cases(source).cases).scores.values():
        assert np.all((scores.validity >= 0) & (scores.validity <= 1))


READERS = {
    **{name: (corpus_rows(name), read_corpus) for name in CORPORA},
    "candidates": (CANDIDATES, read_scored),
    "questions": (QUESTIONS, read_to_sample),
    "test sets": (QUESTIONS, read_questions),
    "prepare": (corpus_rows("stepwise"), run_prepare),
    "bon": (CANDIDATES, run_bon),
    "process_bench": (PROCESS_BENCH, run_process_bench),
    "prm_bench": (PRM_BENCH, run_prm_bench),
    "case scores": (CASE_SCORES, read_case_scores),
}


@contextlib.contextmanager
def no_endless_wait():
    """An AssertionError instead of a suite that hangs."""

    def stop(*_):
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault(use, *arguments):
    """What is wrong with how an input is taken; None for a result, or one line."""
    try:
        with no_endless_wait(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            use(*arguments)
    except UserError as error:
        return None if "\n" not in str(error) and len(str(error)) < 2_000 else f"not one line: {str(error)[:300]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


@pytest.mark.parametrize("kind", READERS)
def test_mutated_rows(tmp_path, kind):
    rows, use = READERS[kind]
    rng, faults = random.Random(f"rows {kind}"), []
    for number in range(40 if kind != "bon" else 25):
        lines = [encode(row) for row in rows]
        place = rng.randrange(len(rows))
        lines[place] = mutate_row(rows[place], rng)
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
        if found := fault(use, path):
            faults.append(f"{number}: {lines[place][:200]}: {found}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("kind", READERS)
def test_mutated_files(tmp_path, kind):
    rows, use = READERS[kind]
    data = ("\n".join(map(encode, rows)) + "\n").encode()
    rng, faults = random.Random(f"files {kind}"), []
    for number, change in enumerate(FILE_CHANGES * 2):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(change(data, rng))
        if found := fault(use, path):
            faults.append(f"{number}: {found}")
    assert not faults, "\n".join(faults)


def parse_and_use(config_type, argv):
    """Parse, check what is parsed, and write it as a command would."""
    config = flags.parse(config_type, argv)
    for value in config_files.as_dict(config).values():
        if isinstance(value, int | float):
            assert abs(value) <= LARGEST, f"{value} is taken"
        for text in value if isinstance(value, tuple) else (value,):
            assert not isinstance(text, str) or "\x00" not in text, "a NUL is taken"
    again = flags.parse(config_type, ["again", *config_files.as_flags(config)])
    assert config_files.as_dict(again) == config_files.as_dict(config)
    config_files.flag_file(config).encode()
    if config_type is TrainConfig:
        validate_options(config)
        rules.parse_mesh(config.device.mesh, 8)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag(command):
    config_type, faults, rng = COMMANDS[command], [], random.Random(f"flags {command}")
    for _, field in flags._options(config_type):
        for value in rng.sample(flag_values(field.metadata["kind"]), 4):
            argument = f"--{field.name}={value}"
            if found := fault(parse_and_use, config_type, [command, argument]):
                faults.append(f"{argument[:60]!r}: {found}")
    assert not faults, f"{len(faults)}\n" + "\n".join(faults)
