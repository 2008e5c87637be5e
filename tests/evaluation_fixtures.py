"""A small world of scored questions with everything in it that tables and pages show."""

from __future__ import annotations

import pytest

from cfprm_jax.data.candidates import parse_question
from cfprm_jax.evaluation.options import BonConfig
from cfprm_jax.report import best_of_n as best_of_n_report

NASTY = 'x</script><script>document.title="taken"</script><img src="http://192.0.2.1/x.png" onerror="alert(1)"> & <b>'


def row(number, dataset, answer, candidates, **fields):
    made = [
        {
            "steps": steps,
            "step_scores": scores,
            "predicted": predicted,
            "correct": predicted == answer,
        }
        for steps, scores, predicted in candidates
    ]
    return {
        "id": f"{dataset}-{number}",
        "dataset": dataset,
        "question": f"What is $\\frac{{{number}}}{{2}}$? {NASTY}",
        "answer": answer,
        "candidates": made,
        **fields,
    }


def world():
    """Six questions of two data sets, four candidates each; candidate 3 cannot be scored."""
    rows = []
    for number in range(6):
        dataset = "math500" if number < 4 else "gsm_plus"
        answer = "None" if number == 5 else str(number)
        fields = {"level": 1 + number % 2} if number < 4 else {"perturbation_type": f"kind {number}"}
        candidates = [
            (["First, $1+1=2$.", f"So \\boxed{{{number + 1}}} {NASTY}"], [0.9, 0.25], str(number + 1)),
            (["Clearly", "x < 3 & y > 2", f"\\[ y = {number} \\]"], [0.5, 0.75, 0.97], answer),
            (["Guess."], [0.1 * number], answer),
            ([], None, "9"),
        ]
        rows.append(row(number, dataset, answer, candidates, **fields))
    return rows


def questions(rows):
    return [parse_question(each, f"c.jsonl:{line}") for line, each in enumerate(rows, 1)]


def config(**options):
    return BonConfig(**{"n": ("2", "4"), "grader": "none", "resamples": 200, **options})


@pytest.fixture(scope="session")
def made_rows():
    """The rows of the small world."""
    return world()


@pytest.fixture(scope="session")
def result():
    """What bon makes of them."""
    return best_of_n_report.evaluate(questions(world()), config(aggregation=("min", "last")))


@pytest.fixture(scope="session")
def compared():
    """The same with a second system, which scores the other way round."""
    second = world()
    for each in second:
        for candidate in each["candidates"]:
            if candidate["step_scores"]:
                candidate["step_scores"] = [round(1 - score, 2) for score in candidate["step_scores"]]
    return best_of_n_report.evaluate(
        questions(world()), config(aggregation=("min",), name="A_1", name2="B", policy="7B"), questions(second[::-1])
    )
