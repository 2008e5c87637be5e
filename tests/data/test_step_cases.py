"""Cases with known wrong steps: PRMBench's and ReasonEval's rows, and what is wrong with rows."""

from __future__ import annotations

import gzip
import json

import pytest

from cfprm_jax.data.step_cases import CONTROL, PUBLISHED, read_cases
from cfprm_jax.errors import UserError


def prm_row(classification="circular", idx="prm_test_0", **fields):
    return {
        "original_question": "What is $1+1$?",
        "modified_question": "What is 1 + 1, if anything?",
        "original_process": ["a", "b"],
        "modified_process": ["a", "wrong", "b"],
        "error_steps": [2],
        "classification": classification,
        "idx": idx,
        **fields,
    }


def eval_row(**fields):
    return {"id": 7, "question": "q", "model_output_step_format": [["a"], ["b", "c"], ["d"]], **fields}


def written(tmp_path, rows, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / name


def test_a_row_of_prm_bench(tmp_path):
    (case,) = read_cases(written(tmp_path, [prm_row(error_steps=[3, 2, 3])])).cases
    assert case.key == ("circular", "prm_test_0") and case.kind == "prm_bench"
    assert case.question == "What is 1 + 1, if anything?" and case.steps == ("a", "wrong", "b")
    assert case.error_steps == (2, 3) and case.judged == 3 and case.beyond == ()
    assert case.group == "whatis1+1?" and case.forms == {"whatis1+1?", "whatis1+1,ifanything?"}
    assert case.source == "rows.jsonl:1"
    # The field "question" has what all of them were made of.
    (case,) = read_cases(written(tmp_path, [prm_row(question="Add 1 to 1.")])).cases
    assert case.group == "add1to1." and len(case.forms) == 3


def test_a_redundant_case_has_a_control(tmp_path):
    control, case = read_cases(written(tmp_path, [prm_row("redundency")])).cases
    assert control.key == (CONTROL, "prm_test_0") and case.key == ("redundency", "prm_test_0")
    assert control.question == "What is $1+1$?" and control.steps == ("a", "b") and control.error_steps == ()


def test_joined_names_doubles_and_steps_beyond_the_last(tmp_path):
    found = read_cases(
        written(
            tmp_path,
            [prm_row(idx="circular_prm_test_0"), prm_row(error_steps=[1]), prm_row(idx="b", error_steps=[1, 9])],
        )
    )
    assert [case.idx for case in found.cases] == ["prm_test_0", "b"] and found.cases[0].error_steps == (2,)
    assert found.doubled == (("rows.jsonl:2", "rows.jsonl:1"),)
    assert found.cases[1].error_steps == (1,) and found.cases[1].beyond == (9,)


def test_rows_of_reason_eval(tmp_path):
    wrong = {"model_output_solution_correctness": "wrong", "model_output_solution_first_error_step": "2"}
    rows = [
        eval_row(rating=[1, 0, 1]),
        eval_row(id=8, **wrong, model_output_answer_correctness="correct"),
        eval_row(id=9, model_output_solution_correctness="correct", model_output_solution_first_error_step="N/A"),
    ]
    redundant, invalid, fine = read_cases(written(tmp_path, rows, "mr-math.json")).cases
    assert redundant.kind == "redundant" and redundant.error_steps == (2,) and redundant.judged == 3
    assert redundant.steps == ("a", "b", "c", "d") and redundant.pieces == (1, 2, 1)
    assert invalid.key == ("mr-math", "8") and invalid.kind == "invalid"
    assert invalid.error_steps == (2,) and invalid.judged == 2 and invalid.right_answer
    assert fine.error_steps == () and fine.judged == 3 and not fine.right_answer
    texts = {
        "uuid": "x",
        "question": "q",
        "model_output_steps": ["a", "b"],
        "model_output_solution_correctness": "correct",
    }
    (case,) = read_cases(written(tmp_path, [texts])).cases
    assert case.steps == ("a", "b") and case.pieces == (1, 1) and case.idx == "x"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (prm_row("circulär"), "\"classification\" 'circulär' is not among: redundency, circular"),
        (prm_row(error_steps=[0]), '"error_steps" holds 0, expected numbers of steps, from 1 to 3'),
        (prm_row(error_steps=["2"]), "\"error_steps\" holds '2'"),
        (prm_row(error_steps=[True]), '"error_steps" holds True'),
        (prm_row(error_steps=None), "'error_steps'"),
        (prm_row(modified_process=[]), '"modified_process" is empty'),
        (prm_row(modified_process=["a", 1]), "'modified_process'"),
        (prm_row(idx=3), "'idx'"),
        ({"problem": "q"}, 'neither a row of PRMBench ("modified_process", ...) nor one of ReasonEval'),
        (eval_row(rating=[1, 0]), '"rating" has 2 entries for 3 steps'),
        (eval_row(rating=[1, 0, 2]), '"rating" holds something else than 1 and 0'),
        (eval_row(rating=[1, 1, 1], model_output_step_format=[["a"], [], ["b"]]), "none of them empty"),
        (eval_row(rating=[1, 1, 1], id=None), '"id" is None'),
        (eval_row(model_output_solution_correctness="maybe"), 'expected "correct" or "wrong"'),
        (
            eval_row(model_output_solution_correctness="wrong", model_output_solution_first_error_step="N/A"),
            "expected the number of one of 3 steps, from 1",
        ),
        (eval_row(model_output_solution_correctness="wrong", model_output_solution_first_error_step=4), "of 3 steps"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(UserError) as error:
        read_cases(written(tmp_path, [prm_row(idx="fine"), row]))
    assert str(error.value).startswith("rows.jsonl:2: ") and message in str(error.value)


def test_the_published_files(shared):
    files = sorted((shared / "data" / "prmbench").glob("*.jsonl.gz"))
    found = read_cases(files)
    rows = sum(gzip.decompress(file.read_bytes()).count(b"\n") for file in files)
    counted = [case for case in found.cases if case.classification != CONTROL]
    assert rows == 3013 and len(counted) + len(found.doubled) == rows and len(found.doubled) == 5
    assert {case.classification for case in counted} == set(PUBLISHED)
    assert sum(case.classification == CONTROL for case in found.cases) == 357
    assert sum(bool(case.beyond) for case in counted) == 43
